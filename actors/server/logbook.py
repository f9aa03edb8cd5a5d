"""Build logs on disk: one file per assignment, appended in batches off the loop.

A disk that takes or gives nothing costs logs; it is no reason for the actor to fail.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import trio

from actors.hangs import Inlet
from actors.ledger.port import Offload, Waiting
from actors.outage import Outage
from actors.server.effects import DropLogs, Log, ReadLog
from actors.server.log_quota import keep_quota
from transport import messages as m

log = logging.getLogger("headrace.logbook")

MAX_QUEUED = 10_000
MAX_QUEUED_BYTES = 64 * 2**20
MAX_LOG_BYTES = 64 * 2**20
READ_BYTES = 2**20
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,100}")


class Logbook:
    """`put` never waits: beyond 64 MiB of unwritten log, chunks are dropped and counted."""

    def __init__(
        self, folder: Path, answer: Callable[[bytes, m.CmdLogsReply], None], quota: float = 0.0
    ) -> None:
        """`quota` is the bytes that all logs may take, 0 = any."""
        self._folder = folder
        self._quota = quota
        self._answer = answer
        self._waiting: Waiting[Log | ReadLog | DropLogs] = Waiting(MAX_QUEUED)
        self._queued_bytes = 0
        self._outage = Outage()
        self.dropped = 0
        """Chunks that found the queue or the disk full."""

    @property
    def queue(self) -> int:
        return len(self._waiting)

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        """What the logbook takes from."""
        return (self._waiting.inlet("queue"),)

    def put(self, item: Log | ReadLog | DropLogs) -> None:
        """Queues a chunk for writing, or a client's read behind the chunks before it; a removal
        that finds no room leaves the logs where they are."""
        size = len(item.data) if isinstance(item, Log) else 0
        if self._queued_bytes + size > MAX_QUEUED_BYTES or not self._waiting.put(item):
            self.dropped += 1
            return
        self._queued_bytes += size

    async def run(self, offload: Offload = trio.to_thread.run_sync) -> None:
        """Serves the queue and keeps the quota until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve, offload)
            if self._quota:
                nursery.start_soon(keep_quota, self._folder, self._quota, offload)

    async def _serve(self, offload: Offload) -> None:
        while True:
            first = await self._waiting.head()
            if isinstance(first, ReadLog):
                data, following = await self._waiting.offload(
                    offload, self._read, first.job_id, first.offset
                )
                self._waiting.done()
                reply = m.CmdLogsReply(
                    request=first.request,
                    job_id=first.job_id,
                    offset=following,
                    data=data,
                    is_end=first.has_ended and len(data) < READ_BYTES,
                )
                self._answer(first.peer, reply)
                continue
            if isinstance(first, DropLogs):
                await self._waiting.offload(offload, self._remove, first.job_ids)
                self._waiting.done()
                continue
            chunks = []
            for item in self._waiting.items:
                if not isinstance(item, Log):
                    break
                chunks.append(item)
            self.dropped += await self._waiting.offload(offload, self._append, chunks)
            for chunk in chunks:
                self._waiting.done()
                self._queued_bytes -= len(chunk.data)

    def _append(self, chunks: Iterable[Log]) -> int:
        """Returns how many chunks could not be written."""
        lost = 0
        by_file: dict[Path, list[bytes]] = {}
        for chunk in chunks:
            path = self._job_folder(chunk.job_id) / f"{_file_name(chunk.assignment_id)}.log"
            by_file.setdefault(path, []).append(chunk.data)
        for path, parts in by_file.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    room = max(0, MAX_LOG_BYTES - file.tell())
                    file.write(b"".join(parts)[:room])
            except OSError as error:
                if self._outage.begins():
                    log.error("build logs are not written: %s", error)  # noqa: TRY400 - one line
                lost += len(parts)
        if not lost and self._outage.ends():
            log.info("build logs are written again; %d pieces were dropped", self.dropped)
        return lost

    def _read(self, job_id: str, offset: int) -> tuple[bytes, int]:
        """Up to 1 MiB of the newest run's log from `offset`, and where the next part starts."""
        files = sorted(self._job_folder(job_id).glob("*.log"), key=lambda p: p.stat().st_mtime_ns)
        if not files or offset > MAX_LOG_BYTES:
            return b"", offset
        try:
            with files[-1].open("rb") as file:
                file.seek(offset)
                data = file.read(READ_BYTES)
        except OSError as error:
            log.error("a build log is not read: %s", error)  # noqa: TRY400 - one line
            return b"", offset
        return data, offset + len(data)

    def _remove(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            shutil.rmtree(self._job_folder(job_id), ignore_errors=True)

    def _job_folder(self, job_id: str) -> Path:
        return self._folder / _file_name(job_id)


def _file_name(name: str) -> str:
    """The id itself where it is a harmless file name, else its hash."""
    if _PLAIN.fullmatch(name):
        return name
    return hashlib.sha256(name.encode()).hexdigest()
