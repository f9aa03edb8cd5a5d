"""Rows of the ledger as records: what reads of every kind have in common."""

# ruff: noqa: S608 (statements are joined from constants only; every value is bound)

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec

from .connection import select_in
from .records import JobRecord, Known

VISIBLE = "j.submission NOT IN (SELECT seq FROM submission WHERE state = 'staging')"
"""Condition on a job `j` that it was not just staged."""

JOB_COLUMNS = """
SELECT j.seq, j.id, j.kind, j.project, j.name, j.status, j.drv_path, b.outputs, b.payload,
    j.prioritized, j.interactive, j.attempts, j.losses, j.ready_at, j.retry_at, j.error,
    (SELECT k.id FROM cluster_member m JOIN cluster_job k ON k.id = m.cluster
        WHERE m.job = j.id AND k.ended_at IS NULL)
FROM job j JOIN job_body b ON b.job = j.seq
"""

_KNOWN = f"""
SELECT j.seq, j.drv_path, j.id, j.status, b.outputs
FROM job j JOIN job_body b ON b.job = j.seq WHERE j.seq IN (*) AND {VISIBLE}
"""

_encoder = msgspec.json.Encoder()
_paths = msgspec.json.Decoder(tuple[str, ...])


def encoded(paths: tuple[str, ...]) -> str:
    """The column `outputs`."""
    return _encoder.encode(paths).decode()


def decoded(outputs: str) -> tuple[str, ...]:
    return _paths.decode(outputs)


def job_record(row: tuple[Any, ...], inputs: tuple[str, ...], offset: float) -> JobRecord:
    """A row of `JOB_COLUMNS`, times turned back to the server's clock."""
    return JobRecord(
        job_id=row[1],
        kind=row[2],
        project=row[3],
        name=row[4],
        status=row[5],
        drv_path=row[6],
        outputs=_paths.decode(row[7]),
        payload=row[8],
        inputs=inputs,
        prioritized=bool(row[9]),
        interactive=bool(row[10]),
        attempts=row[11],
        losses=row[12],
        ready_at=earlier(row[13], offset),
        retry_at=earlier(row[14], offset),
        error=row[15],
        cluster=row[16],
    )


def earlier(wall: float | None, offset: float) -> float | None:
    """Monotonic time of an optional wall-clock column."""
    return None if wall is None else wall - offset


class Inputs:
    """Edges of some jobs, with a path for each number."""

    def __init__(self, db: sqlite3.Connection, edges: Iterable[tuple[int, int]]) -> None:
        self._of: dict[int, list[int]] = {}
        for job, needs in edges:
            self._of.setdefault(job, []).append(needs)
        self.numbers = {number for needed in self._of.values() for number in needed}
        self.paths: dict[int, str] = dict(
            select_in(db, "SELECT seq, path FROM drv WHERE seq IN (*)", self.numbers)
        )

    def of(self, job: int) -> tuple[str, ...]:
        paths = self.paths
        return tuple([paths[number] for number in self._of.get(job, ())])


def inputs_of(db: sqlite3.Connection, jobs: Collection[int]) -> Inputs:
    return Inputs(
        db,
        select_in(db, "SELECT job, needs FROM dependency WHERE job IN (*)", jobs),
    )


def records(db: sqlite3.Connection, jobs: Collection[int], offset: float) -> list[JobRecord]:
    """The visible ones of these jobs, in id order."""
    inputs = inputs_of(db, jobs)
    rows = select_in(db, f"{JOB_COLUMNS} WHERE j.seq IN (*) AND {VISIBLE}", jobs)
    found = [job_record(row, inputs.of(row[0]), offset) for row in rows]
    found.sort(key=lambda record: record.job_id)
    return found


def known(db: sqlite3.Connection, drvs: Collection[int]) -> Iterator[tuple[int, str, Known]]:
    """Number, path and state of the derivations that have a visible job."""
    for seq, path, job_id, status, outputs in select_in(db, _KNOWN, drvs):
        yield seq, path, Known(job_id, status, _paths.decode(outputs))
