"""What is wrong with a farm that has been through faults, and the report about it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from msgspec import Struct

from bin.chaos.workload import FAILURE, Batch, Expected, is_right

_SHOWN_PER_KIND = 5
TERMINAL = frozenset({"Completed", "Failed", "TimedOut", "DependencyFailed", "Aborted"})

Trouble = Literal["lost", "double", "wrong", "leaked", "orphan", "process", "ledger"]


class JobRow(Struct, frozen=True):
    """A job in the ledger."""

    kind: Literal["build", "eval"]
    key: str
    """Its drv path, or the graph file of an evaluation."""
    status: str
    error: str | None


class ClaimRow(Struct, frozen=True):
    """A claim in the ledger, open while `closed_at` is none."""

    key: str
    outcome: str | None
    closed_at: float | None
    attempt: str | None = None
    """Of a cluster whose member it was."""


class ClusterRow(Struct, frozen=True):
    cluster: str
    status: str


class AttemptRow(Struct, frozen=True):
    """A try of a cluster, open while `finished_at` is none."""

    cluster: str
    outcome: str | None
    finished_at: float | None


class LedgerSeen(Struct, frozen=True):
    jobs: list[JobRow] = []
    claims: list[ClaimRow] = []
    clusters: list[ClusterRow] = []
    attempts: list[AttemptRow] = []
    integrity: tuple[str, ...] = ("ok",)
    """Or what SQLite found."""
    dangling: int = 0
    """Rows that refer to none."""


class Submitted(Struct):
    """What the server said that it has taken."""

    builds: dict[str, Expected] = {}
    endings: dict[str, str] = {}
    """Of evaluations, by graph file."""
    clusters: list[str] = []
    sendings: Counter[str] = Counter()
    """How often each was sent: one whose answer was lost is sent again."""

    def take(self, batch: Batch) -> None:
        self.builds.update(batch.builds)
        self.endings.update(batch.endings)
        self.clusters += [cluster.cluster_id or "" for cluster in batch.clusters]


class Seen(Struct):
    """What was found when all had ended."""

    ledger: LedgerSeen
    outputs: dict[str, str | None]
    """Text by store path; none where there is no valid output."""
    leaks: list[str]
    """Slots still in use, jobs still open, as the server tells them."""
    orphans: list[str]
    """Processes that should not be there."""
    troubles: list[str]
    """Processes that ended by themselves, or did not when they should."""


class Violation(Struct, frozen=True):
    kind: Trouble
    text: str


def judge(submitted: Submitted, seen: Seen) -> list[Violation]:
    """Everything that does not hold; empty when nothing was lost and nothing done twice."""
    violations = [Violation("leaked", text) for text in seen.leaks]
    violations += [Violation("orphan", text) for text in seen.orphans]
    violations += [Violation("process", text) for text in seen.troubles]
    if seen.ledger.integrity != ("ok",):
        violations += [Violation("ledger", text) for text in seen.ledger.integrity]
    if seen.ledger.dangling:
        violations.append(Violation("ledger", f"{seen.ledger.dangling} rows refer to none"))
    return [
        *violations, *_of_jobs(submitted, seen), *_of_clusters(submitted, seen),
        *_of_outputs(submitted, seen),
    ]  # fmt: skip


def _of_jobs(submitted: Submitted, seen: Seen) -> Iterator[Violation]:
    rows: dict[str, list[JobRow]] = {}
    for row in seen.ledger.jobs:
        rows.setdefault(row.key, []).append(row)
    claims: dict[str, Counter[str | None]] = {}
    for claim in seen.ledger.claims:
        # All members of a cluster run again in its next attempt.
        outcome = f"{claim.outcome} {claim.attempt}" if claim.attempt else claim.outcome
        claims.setdefault(claim.key, Counter())[outcome] += 1
        if claim.closed_at is None:
            yield Violation("leaked", f"{claim.key}: its claim is open")
    endings: dict[str, str] = {drv: b.ending for drv, b in submitted.builds.items()}
    for key, ending in (endings | submitted.endings).items():
        found = rows.get(key, [])
        if not found:
            yield Violation("lost", f"{key}: was taken and is not in the ledger")
        for row in found:
            yield from _of_row(row, ending)
        ended = claims.get(key, Counter())
        # An evaluation that is sent again is another one; a build is the same.
        most = len(found) if key in submitted.endings else 1
        for outcome, times in ended.items():
            if outcome is not None and outcome.startswith("Completed") and times > most:
                yield Violation("double", f"{key}: recorded {times} times")
        # One that failed is tried again for each submission.
        if ended["Failed"] > submitted.sendings[key]:
            yield Violation("double", f"{key}: failed {ended['Failed']} times")


def _of_clusters(submitted: Submitted, seen: Seen) -> Iterator[Violation]:
    status = {row.cluster: row.status for row in seen.ledger.clusters}
    for cluster in submitted.clusters:
        if cluster not in status:
            yield Violation("lost", f"cluster {cluster}: was taken and is not in the ledger")
        elif status[cluster] in ("Queued", "Running"):
            yield Violation("lost", f"cluster {cluster}: is still {status[cluster]}")
        elif status[cluster] != "Completed":
            yield Violation("wrong", f"cluster {cluster}: {status[cluster]} for Completed")
        attempts = [row for row in seen.ledger.attempts if row.cluster == cluster]
        if any(row.finished_at is None for row in attempts):
            yield Violation("leaked", f"cluster {cluster}: its attempt is open")
        if sum(row.outcome == "Succeeded" for row in attempts) > 1:
            yield Violation("double", f"cluster {cluster}: succeeded twice")


def _of_row(row: JobRow, ending: str) -> Iterator[Violation]:
    if row.status not in TERMINAL:
        yield Violation("lost", f"{row.key}: is still {row.status}")
    elif row.status != ending:
        yield Violation("wrong", f"{row.key}: {row.status} for {ending}: {row.error}")
    elif row.status == "Failed" and row.kind == "build" and row.error != FAILURE:
        yield Violation("wrong", f"{row.key}: failed for another reason: {row.error}")


def _of_outputs(submitted: Submitted, seen: Seen) -> Iterator[Violation]:
    for drv, build in submitted.builds.items():
        text = seen.outputs.get(build.output)
        if build.ending != "Completed":
            if text is not None:
                yield Violation("wrong", f"{drv}: has an output and should not")
        elif text is None:
            yield Violation("lost", f"{drv}: has no output")
        elif not is_right(text, build):
            yield Violation("wrong", f"{drv}: its output is {text!r}")


def longest_recovery(broken: Sequence[tuple[float, float]], ledger: LedgerSeen) -> float:
    """The longest time that a farm with nothing broken took to end a job, in seconds: of the time
    between two ends of jobs what lies after the first and outside of every fault.

    `broken` is when each fault began and ended; all times are the wall clock's.
    """
    ended = sorted(
        claim.closed_at
        for claim in ledger.claims
        if claim.closed_at is not None and claim.outcome in ("Completed", "Failed")
    )
    spans = sorted(broken)
    longest = 0.0
    for last, following in pairwise(ended):
        if spans and following > spans[0][1]:
            longest = max(longest, _calm(spans, max(last, spans[0][1]), following))
    return longest


def _calm(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """How much of a time lies outside of all spans, which are in order."""
    calm, at = 0.0, start
    for begun, over in spans:
        if begun >= end:
            break
        calm += max(0.0, begun - at)
        at = max(at, over)
    return calm + max(0.0, end - at)


class Report(Struct):
    """How a run went."""

    seed: int
    seconds: float
    faults: dict[str, int]
    """By kind."""
    jobs: dict[str, int]
    """By status, evaluations included."""
    runs: dict[str, int]
    """Claims by outcome."""
    restarts: dict[str, int]
    """Of processes."""
    refused: dict[str, int]
    """Submissions that had to be sent again, by what the server or the connection said."""
    lost: int
    double: int
    longest_recovery_secs: float
    violations: list[Violation]
    repeat: str
    directory: str | None = None
    """Where everything is kept, if it is."""


def report_lines(report: Report) -> list[str]:
    """The report for people."""
    tables: Mapping[str, Mapping[str, Any]] = {
        "fault": report.faults, "jobs": report.jobs, "claims": report.runs,
        "restarts": report.restarts, "sent again": report.refused,
    }  # fmt: skip
    names = [name for table in tables.values() for name in table]
    width = max(map(len, [*names, "longest recovery"]))
    lines: list[str] = []
    for title, rows in tables.items():
        if rows:
            lines += [title, *(f"  {name:{width}}  {n:6}" for name, n in rows.items())]
    lines += [
        f"{'lost':{width + 2}}  {report.lost:6}",
        f"{'double':{width + 2}}  {report.double:6}",
        f"{'longest recovery':{width + 2}}  {report.longest_recovery_secs:6.1f} s",
    ]
    told: Counter[str] = Counter()
    for violation in report.violations:
        told[violation.kind] += 1
        if told[violation.kind] <= _SHOWN_PER_KIND:
            lines.append(f"{violation.kind}: {violation.text}")
    lines += [f"{kind}: {n - _SHOWN_PER_KIND} more" for kind, n in told.items()
              if n > _SHOWN_PER_KIND]  # fmt: skip
    if report.violations:
        lines.append(f"repeat with: {report.repeat}")
    if report.directory is not None:
        lines.append(f"kept in: {report.directory}")
    return lines
