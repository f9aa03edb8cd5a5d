"""What counts as lost, double, wrong or left over."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from bin.chaos.verdict import (
    AttemptRow,
    ClaimRow,
    ClusterRow,
    JobRow,
    LedgerSeen,
    Report,
    Seen,
    Submitted,
    Violation,
    judge,
    longest_recovery,
    report_lines,
)
from bin.chaos.workload import FAILURE, Expected

GOOD = Expected("good", "Completed", "/nix/store/good", "d1")
BAD = Expected("bad", "Failed", "/nix/store/bad", "d2")
AFTER = Expected("after", "DependencyFailed", "/nix/store/after", "d3")
RIGHT = "begin r\nd1\nend r\n"


@pytest.fixture
def submitted() -> Submitted:
    return Submitted(
        builds={"good.drv": GOOD, "bad.drv": BAD, "after.drv": AFTER},
        endings={"g.json": "Failed"},
        sendings=Counter(["good.drv", "bad.drv", "after.drv", "g.json"]),
    )


@pytest.fixture
def seen() -> Seen:
    return Seen(
        ledger=LedgerSeen(
            jobs=[
                JobRow("build", "good.drv", "Completed", None),
                JobRow("build", "bad.drv", "Failed", FAILURE),
                JobRow("build", "after.drv", "DependencyFailed", "input bad ended Failed"),
                JobRow("eval", "g.json", "Failed", "2 of its builds did not complete"),
            ],
            claims=[
                ClaimRow("good.drv", "Abandoned", 1.0),
                ClaimRow("good.drv", "Completed", 2.0),
                ClaimRow("bad.drv", "Failed", 3.0),
                ClaimRow("g.json", "Completed", 1.0),
            ],
            integrity=("ok",),
            dangling=0,
        ),
        outputs={GOOD.output: RIGHT, BAD.output: None, AFTER.output: None},
        leaks=[],
        orphans=[],
        troubles=[],
    )


def kinds(violations: list[Violation]) -> list[str]:
    return [violation.kind for violation in violations]


def with_job(seen: Seen, index: int, **changes) -> Seen:
    jobs = list(seen.ledger.jobs)
    jobs[index] = replace(jobs[index], **changes)
    return replace(seen, ledger=replace(seen.ledger, jobs=jobs))


def with_claim(seen: Seen, claim: ClaimRow) -> Seen:
    return replace(seen, ledger=replace(seen.ledger, claims=[*seen.ledger.claims, claim]))


def test_all_is_well(submitted, seen):
    assert judge(submitted, seen) == []


def test_a_job_that_is_not_there_or_has_not_ended_is_lost(submitted, seen):
    assert kinds(judge(submitted, with_job(seen, 0, key="other.drv"))) == ["lost"]
    [violation] = judge(submitted, with_job(seen, 0, status="Building"))
    assert violation == Violation("lost", "good.drv: is still Building")


def test_another_end_or_another_cause_is_wrong(submitted, seen):
    assert kinds(judge(submitted, with_job(seen, 0, status="Failed"))) == ["wrong"]
    assert kinds(judge(submitted, with_job(seen, 1, error="lost 5 workers"))) == ["wrong"]
    assert kinds(judge(submitted, with_job(seen, 3, status="Completed"))) == ["wrong"]


def test_a_result_that_is_recorded_twice_is_double(submitted, seen):
    again = with_claim(seen, ClaimRow("good.drv", "Completed", 4.0))
    assert kinds(judge(submitted, again)) == ["double"]
    again = with_claim(seen, ClaimRow("bad.drv", "Failed", 4.0))
    assert kinds(judge(submitted, again)) == ["double"]


def test_what_was_sent_twice_may_fail_twice_and_an_evaluation_run_twice(submitted, seen):
    submitted.sendings.update(["bad.drv", "g.json"])
    again = with_claim(seen, ClaimRow("bad.drv", "Failed", 4.0))
    again = with_claim(again, ClaimRow("g.json", "Completed", 4.0))
    assert kinds(judge(submitted, again)) == ["double"]
    again.ledger.jobs.append(seen.ledger.jobs[3])
    assert judge(submitted, again) == []


def test_an_open_claim_is_leaked(submitted, seen):
    assert kinds(judge(submitted, with_claim(seen, ClaimRow("good.drv", None, None)))) == ["leaked"]


@pytest.mark.parametrize(
    ("build", "text", "kind"),
    [
        (GOOD, None, "lost"),
        (GOOD, "begin r\nd1\nend s\n", "wrong"),
        (BAD, "begin r\n", "wrong"),
    ],
)
def test_outputs_are_judged_by_content(submitted, seen, build, text, kind):
    seen.outputs[build.output] = text
    assert kinds(judge(submitted, seen)) == [kind]


def test_a_cluster_completes_in_one_attempt_after_any_number(submitted, seen):
    submitted.clusters.append("c")
    submitted.builds["m.drv"] = Expected("m", "Completed", "/nix/store/m", "d1")
    seen.outputs["/nix/store/m"] = RIGHT
    ledger = replace(
        seen.ledger,
        jobs=[*seen.ledger.jobs, JobRow("build", "m.drv", "Completed", None)],
        claims=[*seen.ledger.claims, ClaimRow("m.drv", "Completed", 1.0, "t1"),
                ClaimRow("m.drv", "Completed", 2.0, "t2")],
        clusters=[ClusterRow("c", "Completed")],
        attempts=[AttemptRow("c", "Failed", 1.5), AttemptRow("c", "Succeeded", 2.0)],
    )  # fmt: skip

    def judged(**changes):
        return kinds(judge(submitted, replace(seen, ledger=replace(ledger, **changes))))

    assert judged() == []
    assert judged(claims=[*ledger.claims, ledger.claims[-1]]) == ["double"]
    assert judged(clusters=[]) == ["lost"]
    assert judged(clusters=[ClusterRow("c", "Queued")]) == ["lost"]
    assert judged(clusters=[ClusterRow("c", "Failed")]) == ["wrong"]
    assert judged(attempts=[*ledger.attempts, AttemptRow("c", None, None)]) == ["leaked"]
    assert judged(attempts=[*ledger.attempts, AttemptRow("c", "Succeeded", 3.0)]) == ["double"]


def test_all_else_that_was_found_counts(submitted, seen):
    found = replace(
        seen, leaks=["w1 has a slot in use"], orphans=["17: sh"], troubles=["w1 ended"],
        ledger=replace(seen.ledger, integrity=("row 7 missing",), dangling=2),
    )  # fmt: skip
    assert kinds(judge(submitted, found)) == ["leaked", "orphan", "process", "ledger", "ledger"]


def test_recovery_is_the_time_without_faults_between_two_ends_of_jobs(seen):
    def longest(broken, *ended):
        claims = [ClaimRow("a", "Completed", at) for at in ended]
        ledger = replace(seen.ledger, claims=[*claims, ClaimRow("b", "Abandoned", 11.0)])
        return longest_recovery(broken, ledger)

    assert longest([(1.0, 2.0)], 0.0, 10.0, 14.0) == 8.0
    assert longest([(1.0, 2.0)], 5.0, 10.0, 14.0) == 5.0
    # Two faults, one within the other, and one that lasts beyond the end.
    assert longest([(1.0, 2.0), (3.0, 8.0), (4.0, 5.0), (9.0, 20.0)], 1.5, 10.0) == 2.0
    assert longest([(8.0, 9.0)], 0.0, 7.0) == 0.0  # before any fault
    assert longest([], 0.0, 7.0) == 0.0
    assert longest([(1.0, 2.0)]) == 0.0


def test_the_report_names_how_to_repeat_a_violation_and_bounds_what_it_shows():
    report = Report(
        seed=3, seconds=20, faults={"kill-server": 2}, jobs={"Completed": 5}, runs={},
        restarts={"server": 2}, refused={}, lost=7, double=0, longest_recovery_secs=1.25,
        violations=[Violation("lost", f"job {n}") for n in range(7)],
        repeat="headrace chaos --seed 3", directory="/kept",
    )  # fmt: skip
    assert report_lines(report) == [
        "fault",
        "  kill-server            2",
        "jobs",
        "  Completed              5",
        "restarts",
        "  server                 2",
        "lost                     7",
        "double                   0",
        "longest recovery       1.2 s",
        *(f"lost: job {n}" for n in range(5)),
        "lost: 2 more",
        "repeat with: headrace chaos --seed 3",
        "kept in: /kept",
    ]
