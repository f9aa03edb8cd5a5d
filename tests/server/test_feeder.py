"""The feeder against a naive model: any graph, any outcomes, any order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.ledger.records import Admitted, SetJob
from actors.server.effects import Enter, Leave, Record
from actors.server.feeder import Feeder
from actors.server.jobs import build_record
from tests.server.farm_harness import job

OUTCOMES = ("Completed", "Permanent", "Timeout", "lost", "declined", "cancelled")


@st.composite
def graphs(draw):
    """By job, the earlier jobs it needs."""
    count = draw(st.integers(1, 12))
    return [
        sorted(draw(st.sets(st.integers(0, n - 1), max_size=3))) if n else [] for n in range(count)
    ]


@settings(max_examples=300, deadline=None)
@given(graphs(), st.data())
def test_each_job_starts_once_its_inputs_are_built_and_ends_as_the_model_says(graph, data):
    feeder = Feeder(max_attempts=2, retry_backoff=1.0, max_losses=3)
    records = [
        build_record(job(f"n{n}", *(f"n{i}" for i in needs)), f"j{n:02}", interactive=False)
        for n, needs in enumerate(graph)
    ]
    feeder.admission_sent("s")
    nothing = Admitted("s", {}, (), frozenset())
    effects = feeder.merge(records, "s", nothing, 0.0)
    effects += feeder.admission_ended("s", 0.0)

    expected: dict[int, str] = {}
    pool: set[int] = set()
    written: dict[int, str] = {}

    def take(effects):
        for effect in effects:
            match effect:
                case Enter(entry):
                    number = int(entry.job_id[1:])
                    assert number not in pool
                    assert all(expected.get(i) == "Completed" for i in graph[number])
                    assert entry.required_paths == tuple(
                        (f"/nix/store/n{i}", None) for i, _ in entry_inputs(entry)
                    )
                    pool.add(number)
                case Leave(job_id):
                    pool.discard(int(job_id[1:]))
                case Record(SetJob() as write):
                    written[int(write.job_id[1:])] = write.status

    def entry_inputs(entry):
        number = int(entry.job_id[1:])
        built = [int(path.rpartition("n")[2]) for path, _ in entry.required_paths]
        assert sorted(built) == graph[number]
        return [(i, None) for i in built]

    def ends(number: int, status: str) -> None:
        expected[number] = status
        if status != "Completed":
            for later, needs in enumerate(graph):
                if number in needs and later not in expected:
                    ends(later, "DependencyFailed")

    take(effects)
    feeder.check()
    losses: dict[int, int] = {}
    now = 0.0
    while pool:
        now += 1.0
        number = data.draw(st.sampled_from(sorted(pool)))
        job_id = f"j{number:02}"
        outcome = data.draw(st.sampled_from(OUTCOMES))
        if outcome != "cancelled":
            pool.discard(number)
            feeder.claimed(job_id)
        match outcome:
            case "Completed":
                ends(number, "Completed")
                take(feeder.completed(job_id, now))
            case "Permanent" | "Timeout":
                ends(number, "Failed" if outcome == "Permanent" else "TimedOut")
                take(feeder.failed(job_id, outcome, "why", now))
            case "lost":
                losses[number] = losses.get(number, 0) + 1
                if losses[number] == 3:
                    ends(number, "Failed")
                take(feeder.returned(job_id, now, lost=True, why="gone"))
            case "declined":
                take(feeder.returned(job_id, now, lost=False, why="declined"))
            case "cancelled":
                ends(number, "Aborted")
                take(feeder.cancel([job_id], now)[2])
        feeder.check()
    assert expected.keys() == set(range(len(graph)))
    assert written == expected
    assert not feeder.nodes
    assert sum(feeder.counts.values()) == len(graph)


def test_a_long_chain_ends_without_recursion():
    feeder = Feeder()
    count = 5_000
    records = [
        build_record(job(f"n{n}", *([f"n{n - 1}"] if n else [])), f"j{n:05}", interactive=False)
        for n in range(count)
    ]
    feeder.admission_sent("s")
    feeder.merge(records, "s", Admitted("s", {}, (), frozenset()), 0.0)
    feeder.admission_ended("s", 0.0)
    feeder.claimed("j00000")
    feeder.failed("j00000", "Permanent", "why", 1.0)
    assert feeder.counts == {"Created": 0, "Queued": 0, "Building": 0, "Failed": 1,
                             "DependencyFailed": count - 1}  # fmt: skip
