"""Drives a `WorkerCore`: its connection, its jobs, its scoring, the heartbeat.

One task steps the core and performs its effects; all others only put events into its inbox.
Scoring runs in a thread of its own, builds are processes, so neither delays the heartbeat.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any, assert_never

import trio

from actors.worker import events as e
from actors.worker import policy
from actors.worker.config import ConfigError, read_peers
from actors.worker.core import WorkerCore
from actors.worker.executors.base import Executor, Failed, score_as_missing
from actors.worker.jobs import Questions, ReportingContext, run_job
from actors.worker.link import Link
from actors.worker.signal_lines import Signal
from actors.worker.signals import Member
from transport import messages as m
from transport.codec import Decoder, Malformed
from transport.interface import ConnectionLost, Connector

log = logging.getLogger("headrace.worker")

_LEVELS: dict[e.Level, int] = {
    "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING,
    "error": logging.ERROR,
}  # fmt: skip
_INBOX_EVENTS = 256
_FLUSH_EVERY_SECS = 0.02
_LAST_FLUSH_SECS = 0.5
_WATCH_PEERS_EVERY_SECS = 2.0
_LOOK_AT_DISKS_EVERY_SECS, _LOOK_AT_DISKS_SECS = 2.0, 5.0

MetricsSource = Callable[[dict[str, int]], m.WorkerMetrics]


class WorkerShell:
    """Runs one worker until its core exits."""

    def __init__(
        self,
        core: WorkerCore,
        executor: Executor,
        connector: Connector,
        endpoint: str,
        read_metrics: MetricsSource,
        peers_file: Path | None = None,
        in_thread: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync,
        find_trouble: Callable[[], str | None] | None = None,
    ) -> None:
        """`in_thread` runs the scoring; a simulation, which has no threads, gives its own.
        `find_trouble` says in one line why no job should start, if so; see `Disks`."""
        self._core = core
        self._executor = executor
        self._connector = connector
        self._endpoint = endpoint
        self._read_metrics = read_metrics
        self._peers_file = peers_file
        self._in_thread = in_thread
        self._find_trouble = find_trouble
        self._decoder = Decoder(m.SERVER_MESSAGES)
        self._inbox_in, self._inbox = trio.open_memory_channel[e.Event](_INBOX_EVENTS)
        # The core bounds it: MAX_UNSCORED_PAGES.
        self._pages_in, self._pages = trio.open_memory_channel[e.ScorePage](inf)
        self._scoring = trio.CapacityLimiter(1)
        self._link: Link | None = None
        self._leaving: Link | None = None
        self._room = trio.Event()
        self._room.set()
        self._local: list[e.Event] = []
        self._jobs: dict[str, trio.CancelScope] = {}
        self._became_idle = trio.Event()
        self._members: dict[str, Member] = {}
        """Cluster members that run, by assignment."""
        self._peaks: dict[str, int] = {}
        self._questions = Questions()
        self._exit_code: int | None = None

    async def run(self) -> int:
        """Returns the exit code."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._beat)
                nursery.start_soon(self._score_pages)
                nursery.start_soon(self._watch_disks)
                if self._peers_file is not None:
                    nursery.start_soon(self._watch_peers, self._peers_file)
                while self._exit_code is None:
                    events = await self._next_events()
                    now = trio.current_time()
                    for event in events:
                        self._perform(self._core.step(event, now), now, nursery)
                    self._flush(now)
                await self._flush_last()
                nursery.cancel_scope.cancel()
        finally:
            for link in (self._link, self._leaving):
                if link is not None:
                    link.close()
        return self._exit_code

    async def drain(self, exit_code: int) -> None:
        """Starts to stop the worker; `run` then returns `exit_code` within 5 s."""
        await self._inbox_in.send(e.DrainRequested(exit_code))

    # -- the core's task -----------------------------------------------------------------

    async def _next_events(self) -> list[e.Event]:
        events, self._local = self._local, []
        wait = 0.0 if events else self._core.deadline - trio.current_time()
        if self._link is not None and self._link.is_full:
            wait = min(wait, _FLUSH_EVERY_SECS)
        with trio.move_on_after(max(0.0, wait)):
            events.append(await self._inbox.receive())
        # What has arrived comes before the verdict that nothing did.
        await trio.lowlevel.checkpoint()
        while len(events) < _INBOX_EVENTS:
            try:
                events.append(self._inbox.receive_nowait())
            except trio.WouldBlock:
                break
        return [*events, e.Tick()]

    def _perform(self, effects: Sequence[e.Effect], now: float, nursery: trio.Nursery) -> None:
        for effect in effects:
            match effect:
                case e.Send(message):
                    if self._link is not None:
                        self._link.put(message)
                case e.StartJob(assignment, roster):
                    self._start_job(assignment, roster, nursery)
                case e.DeliverSignal(assignment_id, sender, payload):
                    if assignment_id in self._members:
                        self._members[assignment_id].deliver(Signal(sender, payload))
                case e.StopJob(assignment_id):
                    # Gone if it has just ended; then its `JobFinished` is in the inbox.
                    if assignment_id in self._jobs:
                        self._jobs[assignment_id].cancel()
                case e.ScorePage():
                    self._pages_in.send_nowait(effect)
                case e.JobAnswered():
                    self._questions.answered(effect)
                case e.Note(level, text):
                    log.log(_LEVELS[level], text)
                case e.Connect(number):
                    self._connect(number, nursery)
                case e.Disconnect():
                    self._disconnect(now)
                case e.Exit(code):
                    self._exit_code = code
                case _:
                    assert_never(effect)

    def _connect(self, number: int, nursery: trio.Nursery) -> None:
        try:
            dealer = self._connector.connect(self._endpoint)
        except ConnectionLost as error:
            self._local.append(e.Lost(number, str(error)))
            return
        self._link = Link(number, dealer)
        nursery.start_soon(self._read, self._link)

    def _disconnect(self, now: float) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        link.flush(now)
        if link.is_full and self._core.draining:
            self._leaving = link
        else:
            link.close()
        self._room.set()

    def _flush(self, now: float) -> None:
        link = self._link
        if link is None:
            return
        reason = link.flush(now)
        if reason is not None:
            self._local.append(e.Lost(link.number, reason))
        if link.is_full and self._room.is_set():
            self._room = trio.Event()
        elif not link.is_full:
            self._room.set()

    async def _flush_last(self) -> None:
        with trio.move_on_after(_LAST_FLUSH_SECS):
            while self._leaving is not None and self._leaving.is_full:
                self._leaving.flush(trio.current_time())
                await trio.sleep(_FLUSH_EVERY_SECS)

    # -- the other tasks -----------------------------------------------------------------

    async def _read(self, link: Link) -> None:
        number = link.number
        with link.reading:
            try:
                while True:
                    for frames in await link.dealer.receive():
                        for frame in frames:
                            await self._inbox_in.send(self._decode(number, frame))
            except ConnectionLost as error:
                await self._inbox_in.send(e.Lost(number, str(error)))
            except trio.ClosedResourceError:
                return  # this side closed it while the reader slept

    def _decode(self, number: int, frame: bytes) -> e.Event:
        try:
            return e.Received(number, self._decoder.decode(frame))
        except Malformed as error:
            return e.Garbled(number, str(error))

    def _start_job(
        self, assignment: e.Assignment, roster: list[m.RosterEntry], nursery: trio.Nursery
    ) -> None:
        scope = trio.CancelScope()
        context = ReportingContext(assignment, self._report, self._peaks, self._questions, roster)
        self._jobs[assignment.assignment_id] = scope
        if context.member is not None:
            self._members[assignment.assignment_id] = context.member
        nursery.start_soon(self._run_job, assignment, context, scope)

    async def _run_job(
        self, assignment: e.Assignment, context: ReportingContext, scope: trio.CancelScope
    ) -> None:
        outcome = None
        with scope:
            outcome = await run_job(self._executor, assignment, context)
        del self._jobs[assignment.assignment_id]
        if not self._jobs:
            self._became_idle.set()
        self._members.pop(assignment.assignment_id, None)
        self._peaks.pop(assignment.job_id, None)
        if isinstance(outcome, Failed) and outcome.kind == "Transient":
            await self._look_at_disks()  # before the next job is asked for
        await self._inbox_in.send(e.JobFinished(assignment.assignment_id, outcome))

    async def _report(self, event: e.Event) -> None:
        """Waits while the server does not read, so that a chatty job cannot fill memory."""
        await self._room.wait()
        await self._inbox_in.send(event)

    async def _score_pages(self) -> None:
        async for page in self._pages:
            if self._link is None or self._link.number != page.connection:
                continue
            try:
                scores = await self._in_thread(
                    self._executor.score,
                    page.candidates,
                    limiter=self._scoring,
                    abandon_on_cancel=True,
                )
            except Exception:  # every candidate gets an answer, whatever the store does
                log.exception("scoring failed; its page is answered as if nothing were there")
                scores = score_as_missing(page.candidates)
            await self._inbox_in.send(e.Scored(page.connection, page.page, scores))

    async def _watch_disks(self) -> None:
        while True:
            await self._look_at_disks()
            await trio.sleep(_LOOK_AT_DISKS_EVERY_SECS)

    async def _look_at_disks(self) -> None:
        if self._find_trouble is not None:
            # A file system that does not answer says nothing of its room.
            with trio.move_on_after(_LOOK_AT_DISKS_SECS):
                trouble = await self._in_thread(self._find_trouble, abandon_on_cancel=True)
                await self._inbox_in.send(e.DisksChecked(trouble))

    async def _beat(self) -> None:
        """Reports the machine, at times and when the jobs that loaded it are over: a server may
        spare a machine that is busy, and what it was busy with is no more."""
        while True:
            metrics = self._read_metrics(self._peaks)
            await self._inbox_in.send(e.MetricsReady(metrics))
            with trio.move_on_after(policy.METRICS_EVERY):
                if (metrics.cpu_usage_pct or 0.0) < policy.LOADED_PCT:
                    await trio.sleep_forever()
                await self._became_idle.wait()
                self._became_idle = trio.Event()
                self._read_metrics(self._peaks)  # ends the interval of which they were a part
                await trio.sleep(policy.SETTLE)

    async def _watch_peers(self, path: Path) -> None:
        known = _stamp(path)
        while True:
            await trio.sleep(_WATCH_PEERS_EVERY_SECS)
            stamp = _stamp(path)
            if stamp == known:
                continue
            known = stamp
            try:
                tokens = read_peers(path)
            except ConfigError as error:
                log.warning("%s; the tokens read before stay in use", error)
                continue
            await self._inbox_in.send(e.PeersChanged(tokens))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does; none without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
