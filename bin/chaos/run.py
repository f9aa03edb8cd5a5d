"""One run: work and faults for a while, then quiet, then the verdict."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio
from msgspec import Struct

from actors.worker.detect import own_system
from bin.chaos import ledger
from bin.chaos.farm import Farm
from bin.chaos.faults import Fault, plan
from bin.chaos.verdict import (
    LedgerSeen,
    Report,
    Seen,
    Submitted,
    Violation,
    judge,
    longest_recovery,
)
from bin.chaos.workload import Batch, Workload
from bin.client import Client, connect
from bin.errors import USAGE, CommandError
from bin.parts import cut
from transport.interface import ConnectionLost, Connector
from transport.messages import CmdStatus, CmdStatusReply

CONNECT_SECS = 5.0
SUBMIT_SECS = 15.0
RETRY_SECS = 0.2
DRAIN_SECS = 120.0
TELL_EVERY_SECS = 5.0
MOST_OPEN = 8
"""Times the number of jobs that are kept open: as far as that goes when none of them can start."""
OPEN = ("waiting", "pending", "running")
_BRIEF = 70  # characters


class Settings(Struct, frozen=True):
    seed: int
    seconds: float
    workers: int
    jobs: int
    """That are kept open, while there are faults, at least."""

    @property
    def command(self) -> str:
        """The command that does the same again."""
        return (
            f"headrace chaos --seed {self.seed} --seconds {self.seconds:g}"
            f" --workers {self.workers} --jobs {self.jobs}"
        )


class Run:
    """Makes one run in `home`, an empty directory; `tell` gets a line of progress now and
    then. Files stay with `keep`, and when something is wrong."""

    def __init__(
        self,
        settings: Settings,
        home: Path,
        connector: Connector,
        tell: Callable[[str], None],
        *,
        keep: bool,
    ) -> None:
        self._settings = settings
        self._home = home
        self._connector = connector
        self._tell = tell
        self._keep = keep
        self._submitting = ""
        self._submitted = Submitted()
        self._unsure: list[Batch] = []
        """May not be sent again, and whether they were taken only the ledger knows."""
        self._refused: Counter[str] = Counter()
        self._applied: Counter[str] = Counter()
        self._broken: list[tuple[float, float]] = []
        self._troubles: list[str] = []
        self._leaks: list[str] = []
        self._client: Client | None = None
        self._over = False

    async def go(self) -> Report:
        """Everything, to the report; nothing runs afterwards, and no disk is mounted."""
        names = [f"w{n}" for n in range(1, self._settings.workers + 1)]
        farm = Farm(self._home, names, self._settings.seconds, self._troubles.append)
        keep = self._keep
        try:
            try:
                async with farm.running():
                    await self._storm(farm, names)
                    await self._calm(farm)
            finally:
                strays = farm.strays()
                farm.end_strays()
            report = await trio.to_thread.run_sync(self._report, farm, strays)
            keep = keep or bool(report.violations)
        finally:
            farm.close(keep=keep)
        return report

    # -- while there are faults ------------------------------------------------------------

    async def _storm(self, farm: Farm, names: list[str]) -> None:
        settings = self._settings
        faults = plan(settings.seed, settings.seconds, names, farm.kinds)
        self._tell(f"seed {settings.seed}: {len(faults)} faults in {settings.seconds:g} s")
        (self._home / "graphs").mkdir()
        async with trio.open_nursery() as work:
            work.start_soon(self._submit, farm)
            work.start_soon(self._tell_progress)
            started = trio.current_time()
            async with trio.open_nursery() as suffering:
                for fault in faults:
                    await trio.sleep_until(started + fault.at)
                    suffering.start_soon(self._suffer, farm, fault)
                await trio.sleep_until(started + settings.seconds)
                suffering.cancel_scope.deadline = trio.current_time() + DRAIN_SECS
            if suffering.cancel_scope.cancelled_caught:
                self._troubles.append(f"what was broken is not back after {DRAIN_SECS:g} s")
            self._over = True
            work.cancel_scope.deadline = trio.current_time() + DRAIN_SECS
        if self._submitting:
            self._leaks.append(f"{self._submitting} was not taken within {DRAIN_SECS:g} s")

    async def _suffer(self, farm: Farm, fault: Fault) -> None:
        begun = time.time()
        if await farm.apply(fault, self._connector):
            self._applied[fault.kind] += 1
            self._broken.append((begun, time.time()))

    async def _tell_progress(self) -> None:
        started = trio.current_time()
        while not self._over:
            with trio.move_on_after(TELL_EVERY_SECS):
                while not self._over:
                    await trio.sleep(RETRY_SECS)
            self._tell(
                f"{trio.current_time() - started:3.0f} s: {self._applied.total()} faults, "
                f"{len(self._submitted.builds)} builds submitted"
            )

    async def _submit(self, farm: Farm) -> None:
        """Keeps the farm busy. Ends once all is answered that was sent."""
        settings = self._settings
        graphs = str(self._home / "graphs")
        workload = Workload(settings.seed, own_system(), graphs, settings.workers)
        while not self._over:
            if not await self._wants_more(farm):
                await trio.sleep(RETRY_SECS)
                continue
            batch = workload.next_batch()
            self._submitting = batch.name
            for name, content in batch.files.items():
                (self._home / "graphs" / name).write_bytes(content)
            while not await self._send(farm, batch):
                if batch.clusters:
                    self._unsure.append(batch)
                    break
                await trio.sleep(RETRY_SECS)
            self._submitting = ""

    async def _send(self, farm: Farm, batch: Batch) -> bool:
        """Whether the server answered, so that it need not be sent again."""
        for key in (*batch.builds, *batch.endings):
            self._submitted.sendings[key] += 1
        with trio.move_on_after(SUBMIT_SECS):
            try:
                client = await self._connected(farm)
                await client.submit(cut(batch.jobs, batch.evaluations, batch.clusters))
            except (CommandError, ConnectionLost) as error:
                self._drop_client()
                if isinstance(error, CommandError) and error.code == USAGE:
                    self._troubles.append(f"{batch.name} was refused: {error}")
                    return True
                self._refused[self._brief(str(error), farm)] += 1
                return False
            self._submitted.take(batch)
            return True
        self._drop_client()
        self._refused["no answer in time"] += 1
        return False

    def _brief(self, text: str, farm: Farm) -> str:
        """What was said, without what differs each time."""
        text = text.replace(farm.endpoint, "the server").replace(str(self._home), "...")
        return text.partition(";")[0][:_BRIEF]

    async def _wants_more(self, farm: Farm) -> bool:
        """Whether more must be submitted so that nobody is idle; false while nobody answers."""
        jobs = (await self._status(farm) or {}).get("jobs")
        if jobs is None:
            return False
        # Of what waits for others much may wait for one job on a worker that is away.
        is_open = sum(jobs[name] for name in OPEN)
        most = self._settings.jobs * (1 if jobs["pending"] else MOST_OPEN)
        return bool(is_open < most)

    async def _status(self, farm: Farm) -> dict[str, Any] | None:
        with trio.move_on_after(CONNECT_SECS):
            try:
                client = await self._connected(farm)
                return (await client.ask(CmdStatus(request=0), CmdStatusReply)).status
            except (CommandError, ConnectionLost):
                pass
        self._drop_client()
        return None

    async def _connected(self, farm: Farm) -> Client:
        if self._client is None:
            self._client = await connect(self._connector, farm.endpoint, CONNECT_SECS)
        return self._client

    def _drop_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- afterwards ------------------------------------------------------------------------

    async def _calm(self, farm: Farm) -> None:
        """Waits until all has ended and nothing is in use any more; notes what does not."""
        self._tell("no more faults; waiting until all has ended")
        deadline = trio.current_time() + DRAIN_SECS
        while (leaks := await self._in_use(farm)) and trio.current_time() < deadline:
            await trio.sleep(RETRY_SECS)
        self._leaks += leaks
        self._drop_client()

    async def _in_use(self, farm: Farm) -> list[str]:
        leaks = [f"a builder still runs: {p.pid}" for p in farm.builders()]
        status = await self._status(farm)
        if status is None:
            return [*leaks, "the server does not answer"]
        present = {worker["id"]: worker for worker in status["workers"]}
        leaks += [f"worker {name} is not there" for name in farm.workers if name not in present]
        for name, worker in present.items():
            used = {kind: slots["used"] for kind, slots in worker["slots"].items()}
            if any(used.values()):
                leaks.append(f"worker {name} has slots in use: {used}")
        open_jobs = {name: status["jobs"][name] for name in OPEN}
        if any(open_jobs.values()):
            leaks.append(f"jobs have not ended: {open_jobs}")
        return leaks

    def _report(self, farm: Farm, strays: list[str]) -> Report:
        """Reads what is left, and judges."""
        try:
            found = ledger.read(farm.ledger_file)
        except sqlite3.Error as error:
            found = LedgerSeen(integrity=(f"cannot be read: {error}",))
        present = {job.key for job in found.jobs}
        for batch in self._unsure:
            if not present.isdisjoint(batch.builds):
                self._submitted.take(batch)
        seen = Seen(
            ledger=found,
            outputs={b.output: farm.output(b.output) for b in self._submitted.builds.values()},
            leaks=self._leaks,
            orphans=strays,
            troubles=[*self._troubles, *self._tracebacks()],
        )
        violations = judge(self._submitted, seen)
        return Report(
            seed=self._settings.seed,
            seconds=self._settings.seconds,
            faults=dict(sorted(self._applied.items())),
            jobs=dict(sorted(Counter(job.status for job in found.jobs).items())),
            runs=dict(sorted(Counter(c.outcome or "open" for c in found.claims).items())),
            restarts={
                daemon.name: daemon.restarts for daemon in (farm.server, *farm.workers.values())
            },
            refused=dict(self._refused.most_common()),
            lost=_count(violations, "lost"),
            double=_count(violations, "double"),
            longest_recovery_secs=round(longest_recovery(self._broken, found), 3),
            violations=violations,
            repeat=self._settings.command,
        )

    def _tracebacks(self) -> list[str]:
        return [
            f"{log.name} has {count} tracebacks"
            for log in sorted(self._home.glob("*.log"))
            if (count := log.read_text(errors="replace").count("Traceback (most recent"))
        ]


def _count(violations: list[Violation], kind: str) -> int:
    return sum(violation.kind == kind for violation in violations)
