"""Takes new jobs into the ledger, whole or not at all, a few milliseconds at a time.

An admission is a sequence of steps. A small one takes them all in one transaction. A large one
takes each in a transaction of its own: what it writes belongs to a submission in state
'staging', which nobody sees, until the last step settles what the ledger held already and flips
that state.

Between two steps others write. What they may do to a staged job is take it over: an admission
that brings the same derivation and ends first makes it its own and leaves a note in
`taken_over`; the last step of the other then finds the job as one that the ledger holds.
"""

# ruff: noqa: S608 (statements are joined from constants only; every value is bound)

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from .clusters import add_clusters, members_to_run_again, refuse_knots, with_jobs
from .connection import Connection, chunks, select_in
from .errors import LedgerError, Refused
from .plan import Plan, entry
from .records import Admission, Admitted, ClusterRecord, JobRecord
from .requeue import broken_inputs, failed_dependents, requeue
from .rows import VISIBLE, encoded, inputs_of, known, records
from .writes import Stamp, new_submission, submission_of

_ADD_DRV = "INSERT INTO drv (path) VALUES (?) ON CONFLICT DO NOTHING"
_ADD_JOB = """
INSERT INTO job (seq, id, kind, project, name, status, drv_path, submission, prioritized,
    interactive, attempts, losses, created_at, ready_at, retry_at, error, changed_at, changed_by)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_ADD_BODY = "INSERT INTO job_body (job, outputs, payload) VALUES (?, ?, ?)"
_ADD_REQUESTER = "INSERT INTO requester (submission, job) VALUES (?, ?) ON CONFLICT DO NOTHING"
_ADD_DEPENDENCY = "INSERT INTO dependency (job, needs) VALUES (?, ?) ON CONFLICT DO NOTHING"
_ADD_DEPENDENT = "INSERT INTO dependent (needs, job) VALUES (?, ?) ON CONFLICT DO NOTHING"
# A measured size is never overwritten by a submitted one.
_ADD_SIZE = """
INSERT INTO store_path (path, nar_size) VALUES (?, ?) ON CONFLICT (path) DO UPDATE
SET nar_size = coalesce(store_path.nar_size, excluded.nar_size)"""
_ADD_PROJECT = "INSERT INTO project (id, created_at) VALUES (?, ?) ON CONFLICT DO NOTHING"


class Admitting:
    """One admission under way.

    `stamp` tells who writes and when, anew for each transaction; `chunk_rows` is about how many
    rows one of them writes.
    """

    def __init__(
        self,
        connection: Connection,
        admission: Admission,
        stamp: Callable[[], Stamp],
        chunk_rows: int,
    ) -> None:
        """Raises: Refused for what is wrong with the admission itself."""
        self._connection = connection
        self._db = connection.db
        self._admission = admission
        self._plan = Plan(admission)
        self._stamp = stamp
        self._chunk_rows = chunk_rows
        self._is_staged = self._plan.rows > chunk_rows
        self._submission = 0  # its key, set by the first step
        self._drvs: dict[str, int] = {}  # numbers of own derivations and of inputs kept
        self._dropped: frozenset[str] = frozenset()
        self._new: set[int] = set()
        # Entries of the admission whose number had a job before: visible, or staged elsewhere.
        self._contested: dict[int, int] = {}
        self._edges: list[np.ndarray[tuple[int, int], np.dtype[np.int64]]] = []
        self._requeued: set[int] = set()
        self._requeued_from: Counter[str] = Counter()
        self._clusters: tuple[ClusterRecord, ...] = ()

    def run(self, pause: Callable[[], None]) -> Admitted:
        """Raises: Refused, LedgerBusy, LedgerFailed; nothing is visible of it then."""
        if not self._is_staged:
            with self._connection.transaction():
                for step in self._steps():
                    step()
        else:
            self._stage(pause)
        with self._connection.errors():
            return self._admitted()

    def _stage(self, pause: Callable[[], None]) -> None:
        steps = self._steps()
        with self._connection.transaction():
            next(steps)()
        try:
            for step in steps:
                pause()
                with self._connection.transaction():
                    step()
        except BaseException:
            # What cannot be deleted now is when a server starts.
            with contextlib.suppress(LedgerError):
                discard(self._connection, self._submission, self._chunk_rows)
            raise

    # -- the steps: a transaction may end after each ------------------------------------------

    def _steps(self) -> Iterator[Callable[[], None]]:
        yield self._begin
        kept = [path for path in self._plan.outside if path not in self._dropped]
        for paths in chunks([*self._plan.own, *kept], self._chunk_rows):
            yield partial(self._number, paths)
        for indices in self._job_chunks():
            yield partial(self._insert_chunk, indices)
        for edges in self._sorted_edges():
            yield partial(self._insert_dependents, edges)
        for sizes in chunks(sorted(self._admission.sizes), self._chunk_rows):
            yield partial(self._insert_sizes, sizes)
        yield self._settle

    def _begin(self) -> None:
        self._look_up_outside()
        stamp = self._stamp()
        requester = self._admission.requester
        if self._is_staged:
            self._submission = new_submission(self._db, requester, "staging", stamp)
        else:
            self._submission = submission_of(self._db, requester, stamp)
        projects = sorted({job.project for job in self._plan.jobs})
        self._db.executemany(_ADD_PROJECT, [(project, stamp.wall) for project in projects])

    def _look_up_outside(self) -> None:
        """Finds the inputs that the admission does not bring, and refuses or drops those that
        the ledger does not hold."""
        outside = self._plan.outside
        policy = self._admission.unknown_inputs
        if not outside or policy == "later":
            return
        numbers = _numbers(self._db, list(outside))
        visible = _visible(self._db, numbers.values())
        unknown = [path for path in outside if numbers.get(path) not in visible]
        if unknown and policy == "refuse":
            index = outside[unknown[0]]
            raise Refused(
                f"{entry(index, self._plan.jobs[index])}: input_drvs: {unknown[0]} is neither"
                " here nor in the ledger: was -r forgotten?"
                " (--assume-inputs-built takes it as built)"
            )
        self._dropped = frozenset(unknown)

    def _number(self, paths: Sequence[str]) -> None:
        found = _numbers(self._db, paths)
        missing = [path for path in paths if path not in found]
        self._db.executemany(_ADD_DRV, [(path,) for path in missing])
        self._drvs.update(found)
        self._drvs.update(_numbers(self._db, missing))

    def _job_chunks(self) -> Iterator[range]:
        start = rows = 0
        for index, job in enumerate(self._plan.jobs):
            rows += 3 + len(job.inputs)
            if rows >= self._chunk_rows:
                yield range(start, index + 1)
                start, rows = index + 1, 0
        if rows:
            yield range(start, len(self._plan.jobs))

    def _insert_chunk(self, indices: range) -> None:
        numbered = {self._number_of(self._plan.jobs[index]): index for index in indices}
        rows = select_in(self._db, "SELECT seq FROM job WHERE seq IN (*)", numbered)
        contested = {seq: numbered[seq] for (seq,) in rows}
        self._contested.update(contested)
        new = {seq: index for seq, index in numbered.items() if seq not in contested}
        edges = self._insert(new)
        if edges:
            self._edges.append(np.array(edges, dtype=np.int64))
        self._db.executemany(_ADD_REQUESTER, [(self._submission, seq) for seq in numbered])

    def _number_of(self, job: JobRecord) -> int:
        if job.drv_path is not None:
            return self._drvs[job.drv_path]
        row = self._db.execute("INSERT INTO drv (path) VALUES (NULL) RETURNING seq").fetchone()
        seq: int = row[0]
        return seq

    def _insert(self, numbered: dict[int, int]) -> list[tuple[int, int]]:
        """Inserts entries by number; returns their edges, of which the reverse is not in yet."""
        self._refuse_taken_ids(numbered.values())
        stamp = self._stamp()
        drvs, dropped = self._drvs, self._dropped
        jobs = [(seq, self._plan.jobs[index]) for seq, index in numbered.items()]
        edges = [
            (seq, drvs[path]) for seq, job in jobs for path in job.inputs if path not in dropped
        ]
        self._db.executemany(_ADD_JOB, [self._row(seq, job, stamp) for seq, job in jobs])
        bodies = [(seq, encoded(job.outputs), job.payload) for seq, job in jobs]
        self._db.executemany(_ADD_BODY, bodies)
        self._db.executemany(_ADD_DEPENDENCY, edges)
        self._new.update(numbered)
        return edges

    def _refuse_taken_ids(self, indices: Iterable[int]) -> None:
        by_id = {self._plan.jobs[index].job_id: index for index in indices}
        for (job_id,) in select_in(self._db, "SELECT id FROM job WHERE id IN (*)", by_id):
            index = by_id[job_id]
            raise Refused(
                f"{entry(index, self._plan.jobs[index])}: job_id: {job_id!r} is taken by"
                " another job: leave it out, or choose another"
            )

    def _row(self, seq: int, job: JobRecord, stamp: Stamp) -> tuple[object, ...]:
        return (
            seq, job.job_id, job.kind, job.project, job.name, job.status, job.drv_path,
            self._submission, job.prioritized, job.interactive, job.attempts, job.losses,
            stamp.wall, stamp.later(job.ready_at), stamp.later(job.retry_at), job.error,
            stamp.wall, stamp.server,
        )  # fmt: skip

    def _sorted_edges(self) -> Iterator[list[list[int]]]:
        """Reverse edges in key order, so that each transaction writes neighbouring pages."""
        if not self._edges:
            return
        edges = np.concatenate(self._edges)
        self._edges.clear()
        edges = edges[np.lexsort((edges[:, 0], edges[:, 1]))][:, ::-1]
        for start in range(0, len(edges), self._chunk_rows):
            yield edges[start : start + self._chunk_rows].tolist()

    def _insert_dependents(self, edges: list[list[int]]) -> None:
        if lost := self._taken_over():
            edges = [edge for edge in edges if edge[1] not in lost]
        self._db.executemany(_ADD_DEPENDENT, edges)

    def _insert_sizes(self, sizes: Sequence[tuple[str, int]]) -> None:
        self._db.executemany(_ADD_SIZE, sizes)

    def _taken_over(self) -> set[int]:
        sql = "SELECT job FROM taken_over WHERE submission = ?"
        return {seq for (seq,) in self._db.execute(sql, (self._submission,))}

    # -- the last step ------------------------------------------------------------------------

    def _settle(self) -> None:
        """Makes the admission visible, and starts again what has to."""
        db = self._db
        stamp = self._stamp()
        lost = self._taken_over()
        self._new -= lost
        for (path,) in select_in(db, "SELECT path FROM drv WHERE seq IN (*)", lost):
            self._contested[self._drvs[path]] = self._plan.own[path]
        held = _visible(db, self._contested)
        for seq in self._contested.keys() - held:
            self._take_over(seq, self._contested[seq])
        members = self._members()
        rerun = members_to_run_again(db, {s: members[s] for s in held & members.keys()})
        needed = inputs_of(db, rerun).numbers
        again = rerun | broken_inputs(db, [*held, *self._outside_of_new(), *needed])
        self._requeued = again | failed_dependents(db, again)
        self._requeued_from = requeue(db, self._requeued, stamp)
        self._add_clusters(held, stamp)
        # What runs for this submission's sake ends with it, also if it did not name it.
        db.executemany(_ADD_REQUESTER, [(self._submission, seq) for seq in again])
        if self._is_staged:
            db.execute("DELETE FROM taken_over WHERE submission = ?", (self._submission,))
            db.execute(
                "UPDATE submission SET state = 'accepted', accepted_at = ? WHERE seq = ?",
                (stamp.wall, self._submission),
            )

    def _members(self) -> dict[int, str]:
        """Numbers of the builds that are members, with a label for errors."""
        members = {m.job_id for c in self._admission.clusters for m in c.members}
        return {
            self._drvs[job.drv_path]: entry(index, job)
            for index, job in enumerate(self._plan.jobs if members else ())
            if job.drv_path is not None and job.job_id in members
        }

    def _add_clusters(self, held: set[int], stamp: Stamp) -> None:
        """Inserts the clusters; members that the ledger held already keep their ids there."""
        if not self._admission.clusters:
            return
        drafted = {seq: self._plan.jobs[self._contested[seq]].job_id for seq in held}
        rows = select_in(self._db, "SELECT seq, id FROM job WHERE seq IN (*)", held)
        ids = {drafted[seq]: job_id for seq, job_id in rows}
        self._clusters = tuple(with_jobs(c, ids) for c in self._admission.clusters)
        add_clusters(self._db, self._clusters, self._submission, stamp)
        if self._requeued - held:
            # Paths within the admission were looked at before it was sent.
            of = {m.job_id: c.cluster_id for c in self._clusters for m in c.members}
            found = select_in(self._db, "SELECT seq, id FROM job WHERE id IN (*)", of)
            refuse_knots(self._db, {seq: of[job_id] for seq, job_id in found})

    def _take_over(self, seq: int, index: int) -> None:
        """Makes another submission's staged job ours, as if it had not been there."""
        db = self._db
        db.execute(
            "INSERT INTO taken_over (submission, job) SELECT submission, seq FROM job"
            " WHERE seq = ?",
            (seq,),
        )
        delete_jobs(db, [seq])
        reverse = [(needs, job) for job, needs in self._insert({seq: index})]
        db.executemany(_ADD_DEPENDENT, reverse)

    def _outside_of_new(self) -> set[int]:
        """Numbers of the inputs of new jobs that the admission does not bring."""
        kept = self._plan.outside.keys() - self._dropped
        if not self._contested:
            return {self._drvs[path] for path in kept}
        return {
            self._drvs[path]
            for own, index in self._plan.own.items()
            if self._drvs[own] in self._new
            for path in self._plan.jobs[index].inputs
            if path in kept
        }

    def _admitted(self) -> Admitted:
        db = self._db
        requeued = records(db, self._requeued, self._stamp().offset)
        asked = {self._drvs[path] for path in self._plan.outside if path not in self._dropped}
        asked |= self._contested.keys()
        asked |= inputs_of(db, self._requeued).numbers
        return Admitted(
            requester=self._admission.requester,
            known={path: state for _, path, state in known(db, asked - self._new)},
            requeued=tuple(requeued),
            dropped_inputs=self._dropped,
            requeued_from=dict(self._requeued_from),
            clusters=self._clusters,
        )


def _numbers(db: sqlite3.Connection, paths: Sequence[str]) -> dict[str, int]:
    return dict(select_in(db, "SELECT path, seq FROM drv WHERE path IN (*)", paths))


def _visible(db: sqlite3.Connection, numbers: Iterable[int]) -> set[int]:
    sql = f"SELECT j.seq FROM job j WHERE j.seq IN (*) AND {VISIBLE}"
    return {seq for (seq,) in select_in(db, sql, numbers)}


def delete_jobs(db: sqlite3.Connection, jobs: Sequence[int]) -> None:
    """Deletes staged jobs with all that is theirs alone."""
    edges = list(select_in(db, "SELECT needs, job FROM dependency WHERE job IN (*)", jobs))
    keys = [(seq,) for seq in jobs]
    db.executemany("DELETE FROM dependent WHERE needs = ? AND job = ?", edges)
    db.executemany("DELETE FROM dependency WHERE job = ?", keys)
    db.executemany("DELETE FROM job_body WHERE job = ?", keys)
    db.executemany("DELETE FROM job WHERE seq = ?", keys)


def discard(connection: Connection, submission: int, chunk_rows: int) -> None:
    """Deletes a staging submission in small transactions, its own row last.

    Raises: LedgerBusy, LedgerFailed.
    """
    key = (submission,)
    while True:
        with connection.transaction() as db:
            requested = db.execute(
                "SELECT r.job, j.submission FROM requester r LEFT JOIN job j ON j.seq = r.job"
                " WHERE r.submission = ? LIMIT ?",
                (submission, max(1, chunk_rows // 8)),
            ).fetchall()
            if not requested:
                db.execute("DELETE FROM taken_over WHERE submission = ?", key)
                db.execute("DELETE FROM submission WHERE seq = ? AND state = 'staging'", key)
                return
            delete_jobs(db, [seq for seq, owner in requested if owner == submission])
            db.executemany(
                "DELETE FROM requester WHERE submission = ? AND job = ?",
                [(submission, seq) for seq, _ in requested],
            )
