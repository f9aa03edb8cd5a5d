"""The ledger in one SQLite file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from .admission import Admitting, discard
from .clusters import open_attempts
from .connection import Connection, Files, Log, open_writer
from .errors import LedgerError
from .prune import HISTORY_SECS, forget, forget_metrics
from .queries import Reads
from .rebuild import rebuild
from .records import Admission, Admitted, Adopted, ClaimRecord, Rebuild, Snapshot, Write
from .snapshot import has_orphans, read_snapshot, requeue_orphans
from .writes import Stamp, perform

CHUNK_ROWS = 2_000
"""About how many rows one transaction of a large admission writes: a few milliseconds."""
_WEEK_SECS, _HOUR_SECS = 7 * 86_400.0, 3_600.0
_BUILDS_PER_PACKAGE = 20
_MAX_EVALUATIONS, _MAX_WAITS, _MAX_WORKERS = 20_000, 50_000, 1_000
_ADOPT = """
UPDATE dispatched_job SET server = ?1 WHERE server = ?2 AND closed_at IS NULL
RETURNING id, job, worker, session, server, claimed_at - ?3, cluster_attempt
"""
_ADOPT_ATTEMPTS = """
UPDATE cluster_attempt SET server = ? WHERE server = ? AND finished_at IS NULL"""
# The loop's commits wait meanwhile, and it can be tried again a second later.
_RELIEVE_TIMEOUT_S = 0.1
_PROBE_TIMEOUT_S = 2.0


def _no_pause() -> None:
    pass


class SqliteLedger(Reads):
    """A server's access to its ledger. Synchronous; three groups of methods:

    - `apply`, `admit`, `recover`, `load`, `relieve`, `probe` and `data_version` use the one write
      connection: one caller at a time, from whatever thread.
    - The reads (see `Reads`) have a connection of their own and take turns on it: from any
      thread, also while another writes.
    - `sync`, `checkpoint` and `wal_bytes`: from any thread, also during all of the above.

    A commit does not wait for the disk (synchronous=NORMAL): it survives the end of the
    process, and a power loss once `sync` was called after it.

    Every method can raise LedgerFailed (or its kind LedgerCorrupt), every one that writes
    LedgerBusy as well.
    """

    def __init__(
        self,
        writer: Connection,
        reader: Connection,
        checkpointer: Connection,
        server: str,
        wall: Callable[[], float],
    ) -> None:
        """Use `open`."""
        super().__init__(reader, server)
        self._writer = writer
        self._checkpointer = checkpointer
        self._log = Log(writer.path, writer.files)
        self._wall = wall
        now = wall()
        with writer.transaction() as db:
            self._server_seq: int = db.execute(
                "INSERT INTO server (id, started_at, logged_at) VALUES (?, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET started_at = excluded.started_at RETURNING seq",
                (server, now, now),
            ).fetchone()[0]

    @classmethod
    def open(
        cls,
        path: Path,
        server: str,
        *,
        create: bool = True,
        wall: Callable[[], float] = time.time,
        files: Files | None = None,
    ) -> Self:
        """Opens, and if need be creates or migrates, the ledger of the server with this id.

        Raises: LedgerTooNew, LedgerCorrupt, LedgerBusy, LedgerFailed; the file is not changed
        by the first two.
        """
        with contextlib.ExitStack() as opened:
            writer = open_writer(path, create=create, files=files)
            opened.callback(writer.close)
            reader = Connection(path, read_only=True, files=files)
            opened.callback(reader.close)
            checkpointer = Connection(path, files=files)
            opened.callback(checkpointer.close)
            ledger = cls(writer, reader, checkpointer, server, wall)
            opened.pop_all()
        return ledger

    def close(self) -> None:
        """Closes the file. The last of all connections to it also writes the log back."""
        super().close()
        self._log.close()
        self._checkpointer.close()
        self._writer.close()

    # -- the write connection --------------------------------------------------------------

    def apply(
        self, writes: Sequence[Write], wall_offset: float, busy_timeout_s: float
    ) -> list[bool]:
        """Performs writes in order, in one transaction; one result for each: whether a claim
        was won, whether a row was still open to be closed, true for all others.

        Raises: LedgerBusy if the write lock was not had in time, LedgerFailed if SQLite could
        not write. Nothing was written then.
        """
        with self._writer.transaction(busy_timeout_s) as db:
            stamp = self._stamp(wall_offset)
            return [perform(db, write, stamp) for write in writes]

    def admit(
        self,
        admission: Admission,
        wall_offset: float,
        *,
        chunk_rows: int = CHUNK_ROWS,
        pause: Callable[[], None] = _no_pause,
    ) -> Admitted:
        """Takes new jobs in, whole or not at all; see `Admission` and `Admitted`.

        One of more than `chunk_rows` rows takes many transactions. `pause` is called between
        them: the caller may let others use the write connection meanwhile, but for another
        admission. Call `checkpoint` from there or elsewhere, since the log grows.

        A known derivation that has not ended, or is `Completed`, only gets one more requester.
        One that ended otherwise starts again, and so does an input that did, and what became
        `DependencyFailed` for nothing but their sake. Fields given for a known derivation are
        not taken over.

        Raises: Refused with one line that names the entry and the field, LedgerBusy,
        LedgerFailed; the ledger is as it was then.
        """
        work = Admitting(self._writer, admission, lambda: self._stamp(wall_offset), chunk_rows)
        return work.run(pause)

    def recover(self, dead: Collection[str]) -> None:
        """Deletes what dead servers, and this one before its start, had staged and not
        finished. To be called before the first admission."""
        with self._writer.errors():
            staging = self._writer.db.execute(
                "SELECT s.seq, v.id FROM submission s JOIN server v ON v.seq = s.server"
                " WHERE s.state = 'staging'"
            ).fetchall()
        for submission, server in staging:
            if server == self.server or server in dead:
                discard(self._writer, submission, CHUNK_ROWS)

    def load(self, wall_offset: float) -> Snapshot:
        """All that a starting server needs, in one state.

        A job that is claimed by its status and by no row becomes `Queued` first: a build that is
        `Building`, an evaluation that is `Evaluating`. An evaluation that is `Building` has
        finished its claim and waits for its builds; it stays.
        """
        with self._writer.errors():
            is_orphaned = has_orphans(self._writer.db)
        if is_orphaned:
            with self._writer.transaction() as db:
                requeue_orphans(db, self._stamp(wall_offset))
        with self.snapshot() as db:
            snapshot = read_snapshot(db, wall_offset)
        # What only helps to choose may be of a slightly later state.
        now = self._wall() - wall_offset
        builds = self.metrics(now - HISTORY_SECS, _BUILDS_PER_PACKAGE, wall_offset)
        evaluations = self.evaluations(now - _WEEK_SECS, _MAX_EVALUATIONS, wall_offset)
        return replace(
            snapshot,
            metrics=(*builds, *evaluations),
            waits=tuple(self.waits(now - _HOUR_SECS, _MAX_WAITS, wall_offset)),
            workers=tuple(self.workers(now - HISTORY_SECS, _MAX_WORKERS, wall_offset)),
            prefetches=tuple(self.prefetches()),
        )

    def adopt(self, dead: Collection[str], wall_offset: float) -> Adopted:
        """Takes over the open claims and attempts of dead servers; whoever asks first gets them.

        What such a server had staged and not finished is deleted.
        """
        self.recover(dead)
        claims: list[ClaimRecord] = []
        with self._writer.transaction() as db:
            attempts = [a for a in open_attempts(db, wall_offset) if a.server in dead]
            for server in dead:
                rows = db.execute(_ADOPT, (self.server, server, wall_offset)).fetchall()
                claims += [ClaimRecord(*row) for row in rows]
                db.execute(_ADOPT_ATTEMPTS, (self.server, server))
        return Adopted(tuple(claims), tuple(attempts))

    def forget(self, jobs: Collection[int], before: float) -> list[str]:
        """Deletes those of the jobs (keys of `old_jobs`) that ended before a wall-clock time and
        that nobody needs, and some metrics that are too old; returns the jobs' ids."""
        with self._writer.transaction() as db:
            forget_metrics(db, self._wall())
            return forget(db, jobs, before)

    def relieve(self) -> int:
        """Empties the log and returns its size in bytes, 0 unless a reader or another server was
        in the way. `checkpoint` first: what it left is copied while the lock is held."""
        with self._writer.errors():
            self._writer.wait_for(_RELIEVE_TIMEOUT_S)
            self._writer.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        # The first commit into an empty log waits for an fsync of the log's header: not the
        # loop's next claim.
        self._touch(_RELIEVE_TIMEOUT_S)
        return self.wal_bytes()

    def probe(self) -> str | None:
        """Why the ledger takes no writes, none if it does: makes one, durably."""
        try:
            self._touch(_PROBE_TIMEOUT_S)
            self.sync()
        except LedgerError as error:
            return str(error)
        return None

    def _touch(self, busy_timeout_s: float) -> None:
        with self._writer.transaction(busy_timeout_s) as db:
            db.execute(
                "UPDATE server SET logged_at = ? WHERE seq = ?", (self._wall(), self._server_seq)
            )

    def rebuild(self, job_id: str, missing: Sequence[str]) -> Rebuild:
        """Queues again what made the `missing` paths among the inputs of a queued job."""
        with self._writer.transaction() as db:
            return rebuild(db, job_id, missing, self._stamp(0.0))

    def data_version(self) -> int:
        """Changes when another server wrote; own writes leave it as it is."""
        with self._writer.errors():
            version: int = self._writer.db.execute("PRAGMA data_version").fetchone()[0]
            return version

    def _stamp(self, wall_offset: float) -> Stamp:
        return Stamp(self._server_seq, self._wall(), wall_offset)

    # -- the log -----------------------------------------------------------------------------

    def sync(self) -> None:
        """Makes all that is committed by now durable: fdatasync of the write-ahead log.

        Needs neither a connection nor the write lock, so that one thread makes durable, in
        groups, what another commits. Sound because

        - a commit is a run of frames appended to the log, and a recovery takes all frames up
          to the first whose salt or running checksum is wrong: what survives is a prefix of the
          commits, and it holds all that was in the file at an fdatasync;
        - a commit that is no longer in the file was checkpointed: SQLite writes the log over
          from its start only after all of it is in the database, and in NORMAL it syncs the log
          before it copies and the database after.

        Raises: LedgerLost, from then on at every call: start the server again.
        """
        self._log.sync()

    def checkpoint(self) -> int:
        """Copies the log into the database as far as nobody is in the way, without waiting for
        anyone, and returns the log's size in bytes.

        The file does not shrink by it: once all is copied the next commit writes from its start
        again. Call `relieve` when it passed 16 MiB all the same.
        """
        with self._checkpointer.errors():
            self._checkpointer.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        return self.wal_bytes()

    def wal_bytes(self) -> int:
        """Size of the write-ahead log's file."""
        return self._log.size()
