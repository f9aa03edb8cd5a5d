"""Seeds of the simulation, and proof that it would notice.

More of them: `python -m tests.sim --seeds N --minutes M`.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from actors.ledger import actor as ledger_actor
from actors.ledger.connection import Log
from actors.ledger.port import AdmissionTaken
from actors.server import graph, jobs, pager, pool, reports
from actors.server.assigner import Assigner
from actors.server.clusters.coordinator import Coordinator
from actors.server.effects import Tell
from actors.server.feeder import Feeder
from actors.server.graph import JobGraph
from actors.server.handout import Handout
from actors.server.jobs import job_map
from actors.server.pager import Pager
from actors.server.settlement import Settlement
from tests.sim.__main__ import SHELLS, main, run, runs
from tests.sim.faults import PRESETS
from tests.sim.watch import Violation
from tests.sim.world import simulate
from transport.codec import assign_job

ROOT = Path(__file__).parents[2]
SEEDS, MUTANT_SEEDS = 300, 100
EVERYTHING = [*PRESETS, SHELLS]


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("preset", EVERYTHING)
def test_no_invariant_breaks_and_everything_ends(preset):
    for seed in range(-(-SEEDS // len(EVERYTHING))):
        run(preset, seed)


@pytest.mark.parametrize(
    "options",
    [
        ["--preset", "storm", "--seed", "7"],
        ["--preset", "servers", "--seed", "7"],
        ["--preset", "power", "--seed", "5"],  # two evaluations end with one build
        ["--shells", "--seed", "7"],
    ],
)
def test_a_seed_gives_the_same_trace_twice(options):
    """In two processes, which hash and allocate differently."""
    traces = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.sim", *options, "--trace"],
            cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hash_seed}, text=True,
            capture_output=True, check=True, timeout=120,
        )  # fmt: skip
        *trace, summary = done.stdout.splitlines()
        assert summary.startswith("1 seeds, 0 violations")
        traces.append(trace)
    assert len(traces[0]) > 50
    assert traces[0] == traces[1]


@pytest.mark.parametrize("preset", ["storm", SHELLS])
def test_a_failing_seed_prints_the_command_that_replays_it(preset, monkeypatch, capsys):
    _recorded_before_it_is_durable(monkeypatch.setattr)
    for seed in range(MUTANT_SEEDS):
        try:
            run(preset, seed)
        except Violation as violation:
            said = str(violation)
            break
    [command] = re.findall(r"^replay: (.*)$", said, re.MULTILINE)
    assert command.startswith("python -m tests.sim ")
    assert main(command.split()[3:]) == 1
    assert said in capsys.readouterr().out


def test_seeds_differ_and_a_time_limit_holds(capsys):
    assert simulate("storm", 1) != simulate("storm", 2)
    assert main(["--seeds", "1000000", "--minutes", "0.0001", "--preset", "calm"]) == 0
    assert re.match(r"[1-9] seeds, 0 violations", capsys.readouterr().out)


# -- deliberate faults, each switched on alone -----------------------------------------------------


def _stale_ids_accepted(patch):
    patch(Assigner, "find", lambda self, session, job_id, _: (
        claim if (claim := self.claims.get(job_id)) and claim.state != "claiming" else None
    ))  # fmt: skip


def _offer_lost_on_return(patch):
    enter, seen = Pager.enter, set()

    def once(self, entry, fragment=None):
        if entry.job_id not in seen:
            seen.add(entry.job_id)
            enter(self, entry, fragment)

    patch(Pager, "enter", once)


def _offered_twice(patch):
    session_changed = Pager.session_changed

    def again(self, name, view):
        session_changed(self, name, view)
        self.session_closed(name)
        self.session_opened(name, view, listed=True)

    patch(Pager, "session_changed", again)


def _assigned_before_the_row(patch):
    claim_it = Handout.claim

    def too_early(self, claim):
        session = self._sessions.by_id[claim.session]
        job = job_map(self._feeder.nodes[claim.job_id], claim.entry)
        frame = assign_job(claim.job_id, claim.assignment_id, job)
        self._out.frames.append((session.peer, frame, claim))
        claim_it(self, claim)

    patch(Handout, "claim", too_early)
    patch(Handout, "next_batch", _once_in_a_while(Handout.next_batch))


def _once_in_a_while(next_batch):
    def held_back(self, now):
        return None if self.out else next_batch(self, now)

    return held_back


def _recorded_before_it_is_durable(patch):
    recorded = reports._recorded

    def at_once(session, claim):
        promise = recorded(session, claim)
        return Tell(promise.peer, promise.message)

    patch(reports, "_recorded", at_once)


def _slots_not_counted(patch):
    patch(Assigner, "_is_full", lambda *_: False)


def _declined_job_lost(patch):
    returned = Feeder.returned

    def forget(self, job_id, now, *, lost, why):
        return [] if why == "declined" else returned(self, job_id, now, lost=lost, why=why)

    patch(Feeder, "returned", forget)


def _retry_never_released(patch):
    patch(Feeder, "due", lambda *_: [])


def _features_not_checked(patch):
    right = pool.eligible

    def any_features(cls, worker):
        return right(cls._replace(features=frozenset()), worker)

    patch(pool, "eligible", any_features)
    patch(pager, "eligible", any_features)


def _orphans_never_released(patch):
    overdue = Assigner.overdue
    patch(Assigner, "overdue", lambda self, now: (*overdue(self, now)[:2], []))


def _claim_of_a_failed_commit_lost(patch):
    patch(Handout, "_give_back", lambda self, claim, _: self._assigner.release(claim))


def _batches_out_of_order(patch):
    def only_this_one(self, number, now):
        writes, claiming = self._batches.pop(number)
        for later in [n for n in self._batches if n > number]:
            self._batches.pop(later)
        positions = {position for position, _ in claiming}
        self._writes += [w for i, w in enumerate(writes) if i not in positions]
        return [claim for _, claim in claiming]

    patch(Settlement, "failed", only_this_one)


def _completed_inputs_not_waited_for(patch):
    link = JobGraph.link

    def impatient(self, node, known, now):
        link(self, node, known, now)
        node.waits_for = max(0, node.waits_for - 1)

    patch(JobGraph, "link", impatient)


def _accepted_before_it_is_durable(patch):
    def answer_at_once(port, request):
        admission = request.draft()
        admitted = port.ledger.admit(admission, port.wall_offset(), pause=lambda: None)
        return AdmissionTaken(request.token, request.sender, admission, admitted)

    patch(ledger_actor, "_admit_durably", answer_at_once)


def _log_never_synced(patch):
    patch(Log, "sync", lambda _: None)


def _failed_commit_taken_for_done(patch):
    def go_on(self, number, now):
        writes, _ = self._settlement._batches[number]
        self.committed(number, [True] * len(writes), now)

    patch(Handout, "commit_failed", go_on)


def _retry_waits_for_the_wall_clock(patch):
    patch(Feeder, "_believe_times", lambda *_: None)


def _started_when_the_first_accepted(patch):
    accepted = Coordinator.accepted

    def impatient(self, claim, now):
        attempt = self._preparing.get(claim.attempt or "")
        if attempt is not None:
            for seat in attempt.seats.values():
                seat.has_accepted = True
        return accepted(self, claim, now)

    patch(Coordinator, "accepted", impatient)


def _seats_never_timed_out(patch):
    patch(Coordinator, "expire", lambda *_: [])


def _members_assigned_singly(patch):
    entry = jobs.pool_entry
    patch(graph, "pool_entry", lambda node, sizes: replace(
        entry(node, sizes), is_cluster_member=False
    ))  # fmt: skip


def _a_retry_forgets_who_reported(patch):
    back = Coordinator._back

    def forgetful(self, members, why, now):
        return back(self, list(members)[1:], why, now)

    patch(Coordinator, "_back", forgetful)


MUTANTS = [
    _stale_ids_accepted, _offer_lost_on_return, _offered_twice, _assigned_before_the_row,
    _recorded_before_it_is_durable, _slots_not_counted, _declined_job_lost,
    _retry_never_released, _features_not_checked, _orphans_never_released,
    _claim_of_a_failed_commit_lost, _batches_out_of_order, _completed_inputs_not_waited_for,
    _accepted_before_it_is_durable, _log_never_synced, _failed_commit_taken_for_done,
    _retry_waits_for_the_wall_clock,
]  # fmt: skip
CLUSTER_MUTANTS = [
    _started_when_the_first_accepted, _seats_never_timed_out, _members_assigned_singly,
    _a_retry_forgets_who_reported,
]  # fmt: skip


def _each(mutants):
    return pytest.mark.parametrize("mutant", mutants, ids=lambda m: m.__name__.strip("_"))


@_each(MUTANTS)
def test_a_deliberate_fault_is_noticed(mutant, monkeypatch):
    mutant(monkeypatch.setattr)
    with pytest.raises(Violation):
        _simulate_all([name for name, faults in PRESETS.items() if not faults.clusters])


@_each(CLUSTER_MUTANTS)
def test_a_deliberate_fault_of_clusters_is_noticed(mutant, monkeypatch):
    mutant(monkeypatch.setattr)
    with pytest.raises(Violation):
        _simulate_all(["clusters"])


def _simulate_all(presets):
    for preset, seed in runs(presets, MUTANT_SEEDS):
        simulate(preset, seed)
