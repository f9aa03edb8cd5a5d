"""What the ledger promises: whole transactions, one open claim a job, nothing overwritten."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from actors.ledger.errors import LedgerBusy, LedgerCorrupt, LedgerFailed, LedgerTooNew, Refused
from actors.ledger.records import (
    AddMessages,
    AddMetric,
    Admission,
    Adopted,
    CloseClaim,
    OpenClaim,
    SetCordon,
    SetJob,
    SetPriority,
    SetSizes,
)
from actors.ledger.sqlite import SqliteLedger
from tests.ledger.ledgers import admit, claim, drv, open_ledger, record


def queued(ledger: SqliteLedger, *names: str) -> None:
    admit(ledger, *(record(name) for name in names))
    ledger.apply([SetJob(n, "Queued", 1.0, 0, 0, ready_at=1.0) for n in names], 0.0, 1.0)


# -- the file --------------------------------------------------------------------------------------


def test_what_was_written_is_there_after_a_reopen(tmp_path):
    first = open_ledger(tmp_path)
    queued(first, "a")
    first.close()
    second = open_ledger(tmp_path, "server-2")
    [job] = second.load(0.0).jobs
    assert (job.job_id, job.status, job.ready_at, job.drv_path) == ("a", "Queued", 1.0, drv("a"))
    second.close()


def test_a_newer_schema_is_refused_and_left_alone(tmp_path):
    open_ledger(tmp_path).close()
    file = tmp_path / "ledger.sqlite3"
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA user_version = 999")
    db.close()
    before = file.read_bytes()
    with pytest.raises(LedgerTooNew, match=r"ledger\.sqlite3"):
        open_ledger(tmp_path)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"not a database at all" * 100, b"SQLite format 3\0" + b"x" * 5000]
)
def test_a_file_that_is_no_ledger_is_named_and_never_overwritten(tmp_path, content):
    file = tmp_path / "ledger.sqlite3"
    file.write_bytes(content)
    with pytest.raises(LedgerCorrupt, match=r"ledger\.sqlite3") as caught:
        open_ledger(tmp_path)
    assert "\n" not in str(caught.value)
    assert file.read_bytes() == content


# -- claims ----------------------------------------------------------------------------------------


def test_a_claim_is_won_once_and_only_of_what_can_start(ledger):
    queued(ledger, "a")
    admit(ledger, record("waits"), requester="s2")
    results = ledger.apply(
        [OpenClaim(claim(1, "a")), OpenClaim(claim(2, "a", "v")), OpenClaim(claim(3, "waits"))],
        0.0, 1.0,
    )  # fmt: skip
    assert results == [True, False, False]
    assert ledger.job("a", 0.0).status == "Building"
    assert [c.assignment_id for c in ledger.load(0.0).claims] == ["a1"]


def test_a_closed_row_keeps_its_outcome(ledger):
    queued(ledger, "a")
    ledger.apply([OpenClaim(claim(1, "a"))], 0.0, 1.0)
    closes = [
        CloseClaim("a", "a1", 9.0, "Completed"), CloseClaim("a", "a1", 10.0, "Abandoned", "late")
    ]  # fmt: skip
    assert ledger.apply(closes, 0.0, 1.0) == [True, False]
    [past] = ledger.claims_of("a", 0.0)
    assert (past.outcome, past.closed_at, past.error) == ("Completed", 9.0, None)


def test_writes_happen_in_order_within_a_batch(ledger):
    queued(ledger, "a")
    results = ledger.apply(
        [
            OpenClaim(claim(1, "a")),
            CloseClaim("a", "a1", 6.0, "Declined"),
            SetJob("a", "Queued", 6.0, 0, 0, ready_at=1.0),
            OpenClaim(claim(2, "a")),
        ],
        0.0, 1.0,
    )  # fmt: skip
    assert results == [True, True, True, True]
    assert [c.outcome for c in ledger.claims_of("a", 0.0)] == ["Declined", None]


def test_two_servers_never_both_win(tmp_path):
    ledgers = [open_ledger(tmp_path), open_ledger(tmp_path, "server-2")]
    names = [f"j{n:03}" for n in range(200)]
    queued(ledgers[0], *names)
    wins: list[list[str]] = [[], []]

    def run(which: int) -> None:
        for n, name in enumerate(names if which else reversed(names)):
            row = claim(n + 1000 * which, name)
            while True:
                try:
                    [won] = ledgers[which].apply([OpenClaim(row)], 0.0, 1.0)
                    break
                except LedgerBusy:
                    continue
            if won:
                wins[which].append(name)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wins[0] + wins[1]) == names
    for ledger in ledgers:
        ledger.close()


def test_a_lock_held_elsewhere_is_busy_and_writes_nothing(tmp_path, ledger):
    queued(ledger, "a")
    other = sqlite3.connect(tmp_path / "ledger.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerBusy):
        ledger.apply([OpenClaim(claim(1, "a"))], 0.0, 0.002)
    other.execute("ROLLBACK")
    other.close()
    assert ledger.apply([OpenClaim(claim(1, "a"))], 0.0, 0.002) == [True]


def test_a_full_disk_fails_whole_and_the_ledger_goes_on_when_there_is_room(ledger):
    queued(ledger, "a")
    db = ledger._writer.db
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages + 1}")
    messages = AddMessages("a", tuple("x" * 4000 for _ in range(50)), ())
    with pytest.raises(LedgerFailed):
        ledger.apply([OpenClaim(claim(1, "a")), messages], 0.0, 1.0)
    assert ledger.job("a", 0.0).status == "Queued"
    db.execute(f"PRAGMA max_page_count = {pages + 1000}")
    assert ledger.apply([OpenClaim(claim(1, "a")), messages], 0.0, 1.0) == [True, True]


# -- admissions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [1, 7, 100_000])
def test_a_graph_comes_in_whole_staged_or_not(ledger, chunk_rows):
    names = [f"n{i}" for i in range(30)]
    jobs = tuple(record(n, *names[max(0, i - 2) : i]) for i, n in enumerate(names))
    pauses = []
    admitted = ledger.admit(
        Admission("s1", jobs), 0.0, chunk_rows=chunk_rows, pause=lambda: pauses.append(1)
    )
    assert (admitted.known, admitted.requeued) == ({}, ())
    snapshot = ledger.load(0.0)
    assert {j.job_id: set(j.inputs) for j in snapshot.jobs} == {
        j.job_id: set(j.inputs) for j in jobs
    }
    assert snapshot.requesters["n3"] == ("s1",)
    assert bool(pauses) == (chunk_rows < 100)


def test_an_unknown_input_is_refused_or_awaited_or_taken_as_built(ledger):
    with pytest.raises(Refused, match=r"nobody\.drv"):
        admit(ledger, record("fine"), record("a", "nobody"))
    assert ledger.load(0.0).jobs == ()
    built = admit(ledger, record("b", "nobody"), unknown_inputs="built")
    assert built.dropped_inputs == {drv("nobody")}
    admit(ledger, record("c", "later"), requester="e1", unknown_inputs="later")
    assert ledger.load(0.0).inputs == {drv("later"): None}
    assert ledger.job("b", 0.0).inputs == ()
    assert ledger.job("c", 0.0).inputs == (drv("later"),)


def test_the_same_derivation_is_one_job_that_both_want(ledger):
    admit(ledger, record("a"))
    again = admit(ledger, record("other-id", drv_path=drv("a")), requester="s2")
    assert again.known[drv("a")].job_id == "a"
    assert ledger.load(0.0).requesters["a"] == ("s1", "s2")
    assert ledger.sole_jobs_of("s1") == []


def test_a_job_id_that_is_taken_is_refused(ledger):
    admit(ledger, record("a"))
    with pytest.raises(Refused, match="job_id"):
        admit(ledger, record("a", drv_path=drv("b")), requester="s2")


def test_what_failed_is_requeued_with_what_failed_for_its_sake(ledger):
    admit(ledger, record("a"), record("b", "a"), record("c", "b"), record("ok"))
    ended = [("a", "Failed"), ("b", "DependencyFailed"), ("c", "DependencyFailed"),
             ("ok", "Completed")]  # fmt: skip
    ledger.apply([SetJob(n, s, 2.0, 1, 2, error="x") for n, s in ended], 0.0, 1.0)
    admitted = admit(ledger, record("new", drv_path=drv("a")), record("ok2", drv_path=drv("ok")),
                     requester="s2")  # fmt: skip
    assert sorted(r.job_id for r in admitted.requeued) == ["a", "b", "c"]
    assert {(r.status, r.attempts, r.losses, r.error) for r in admitted.requeued} == {
        ("Created", 0, 0, None)
    }
    assert admitted.requeued_from == {"Failed": 1, "DependencyFailed": 2}
    assert admitted.known[drv("ok")].status == "Completed"
    assert ledger.counts() == {"Created": 3, "Completed": 1}


def test_leftovers_of_a_staging_that_never_ended_are_invisible_and_go(tmp_path):
    first = open_ledger(tmp_path)
    admit(first, record("seen"))

    def stop() -> None:
        raise KeyboardInterrupt

    jobs = tuple(record(f"n{i}") for i in range(50))
    with pytest.raises(KeyboardInterrupt):
        first.admit(Admission("s2", jobs), 0.0, chunk_rows=5, pause=stop)
    first.close()
    second = open_ledger(tmp_path, "server-2")
    assert [j.job_id for j in second.load(0.0).jobs] == ["seen"]
    assert [j.job_id for j in second.jobs_page(None, None, 100)] == ["seen"]
    second.recover(["server-1"])
    admit(second, *jobs, requester="s3")
    assert len(second.load(0.0).jobs) == 51
    second.close()


# -- start -----------------------------------------------------------------------------------------


def test_a_claimed_status_without_a_row_is_queued_again_at_load(ledger):
    queued(ledger, "a")
    ledger.apply([SetJob("a", "Building", 2.0, 0, 0, ready_at=1.0)], 0.0, 1.0)
    [job] = ledger.load(0.0).jobs
    assert job.status == "Queued"


def test_an_evaluation_that_waits_for_its_builds_stays_as_it_is(ledger):
    evaluation = record("e", kind="eval", drv_path=None, outputs=(), status="Queued", inputs=())
    admit(ledger, evaluation)
    ledger.apply([SetJob("e", "Building", 2.0, 1, 0)], 0.0, 1.0)
    [job] = ledger.load(0.0).jobs
    assert (job.kind, job.status) == ("eval", "Building")


def test_a_snapshot_has_all_that_a_server_needs(ledger):
    admit(ledger, record("a"), record("b", "a"))
    ledger.apply(
        [
            SetJob("a", "Completed", 2.0, 1, 0),
            SetSizes((("/nix/store/a", 77, "sha256:x"),)),
            SetCordon("w9", 3.0, "disk"),
            SetPriority("b", prioritized=True),
        ],
        0.0, 1.0,
    )  # fmt: skip
    snapshot = ledger.load(0.0)
    assert [(j.job_id, j.prioritized) for j in snapshot.jobs] == [("b", True)]
    assert snapshot.inputs[drv("a")].status == "Completed"
    assert snapshot.sizes == {"/nix/store/a": 77}
    assert snapshot.cordons == {"w9": "disk"}
    assert snapshot.counts == {"Completed": 1, "Created": 1}


def test_times_survive_on_the_wall_clock(tmp_path):
    first = open_ledger(tmp_path)
    admit(first, record("a"))
    first.apply([SetJob("a", "Queued", 50.0, 0, 0, ready_at=40.0, retry_at=60.0)], 1_000.0, 1.0)
    first.close()
    second = open_ledger(tmp_path, "server-2")
    [job] = second.load(1_030.0).jobs  # monotonic clocks start anew: 1040 is 10 by now
    assert (job.ready_at, job.retry_at) == (10.0, 30.0)
    second.close()


# -- reads -----------------------------------------------------------------------------------------


def test_pages_are_in_id_order_and_complete(ledger):
    queued(ledger, *(f"j{n:02}" for n in range(25)))
    seen, after = [], None
    while page := ledger.jobs_page(None, after, 10):
        seen += [job.job_id for job in page]
        after = page[-1].job_id
    assert seen == [f"j{n:02}" for n in range(25)]
    assert ledger.jobs_page("Completed", None, 10) == []


@pytest.mark.parametrize("target", ["job-17", "job-1", drv("hello"), "hello"])
def test_a_job_is_found_by_id_prefix_drv_path_or_name(ledger, target):
    admit(ledger, record("hello", job_id="job-17"), record("zzz"))
    assert ledger.find(target, 4) == ["job-17"]
    assert ledger.find("nope", 4) == []


def test_ended_failed_and_unknown_are_told_apart(ledger):
    admit(ledger, record("good"), record("bad"), record("open"))
    ledger.apply(
        [SetJob("good", "Completed", 1.0, 1, 0), SetJob("bad", "Failed", 1.0, 1, 0)], 0.0, 1.0
    )
    ended = ledger.ended_among(["open", "bad", "nope", "good"])
    assert ended == (["bad", "good"], ["bad"], ["nope"])


def test_another_server_sees_what_was_changed_and_takes_over_a_dead_ones_claims(tmp_path, ledger):
    other = open_ledger(tmp_path, "server-2")
    queued(ledger, "a")
    ledger.apply([OpenClaim(claim(1, "a"))], 0.0, 1.0)
    changes = other.foreign_changes(90.0, 0.0)
    assert [(j.job_id, j.status) for j in changes.jobs] == [("a", "Building")]
    assert ledger.foreign_changes(90.0, 0.0).jobs == ()
    [adopted] = other.adopt(["server-1"], 0.0).claims
    assert (adopted.assignment_id, adopted.server) == ("a1", "server-2")
    assert other.adopt(["server-1"], 0.0) == Adopted((), ())
    other.close()


def test_metrics_are_the_latest_of_a_package(ledger):
    queued(ledger, "a")
    ledger.apply([OpenClaim(claim(1, "a"))], 0.0, 1.0)
    metric = AddMetric("a1", "hello", "x86_64-linux", 5.0, 100, 90, 64, 1000, False, 1.0, 1.0)
    ledger.apply([metric], 0.0, 1.0)
    assert ledger.metrics(0.0, 20, 0.0) == [metric]


# -- kill -9 ---------------------------------------------------------------------------------------


def _write_for_ever(folder, started) -> None:
    ledger = open_ledger(folder, "doomed")
    for n in range(1_000_000):
        names = [f"k{n}-{i}" for i in range(20)]
        admit(ledger, *(record(name) for name in names), requester=f"s{n}")
        rows = [SetJob(name, "Queued", 1.0, 0, 0, ready_at=1.0) for name in names]
        ledger.apply(rows, 0.0, 5.0)
        started.set()


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.13])
def test_kill_9_leaves_whole_transactions_only(tmp_path, pause, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # the child finds this module there
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=_write_for_ever, args=(tmp_path, started))
    process.start()
    assert started.wait(30)
    time.sleep(pause)  # anywhere in its work, that is the point
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    ledger = open_ledger(tmp_path, "heir")
    ledger.recover(["doomed"])
    by_admission: dict[str, list[str]] = {}
    for job in ledger.load(0.0).jobs:
        by_admission.setdefault(job.job_id.partition("-")[0], []).append(job.status)
    assert by_admission
    for statuses in by_admission.values():
        assert len(statuses) == 20
        assert len(set(statuses)) == 1
    assert ledger._writer.db.execute("PRAGMA foreign_key_check").fetchall() == []
    ledger.close()
