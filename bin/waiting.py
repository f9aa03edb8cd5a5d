"""Waiting until jobs have ended, across restarts of the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import trio

from bin.client import Steady
from bin.errors import FAILED, CommandError
from bin.summary import clean
from transport.messages import CmdWait, CmdWaitReply

MAX_JOBS_ASKED = 10_000
"""So that a question stays far below a frame's limit, whatever the ids are."""
SHORTEST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.05, 1.0
PAUSE_SHARE = 0.02
"""Of the time waited so far: so much later than the jobs a wait may end."""
PAUSE_SECS_A_JOB = 1e-5
"""Some thirty times what the server needs to answer for one."""


class Waited(NamedTuple):
    open: int
    """Jobs that had not ended when the time was up."""
    failed: int
    """Jobs that ended other than Completed."""

    def check(self, limit: float | None) -> None:
        """Raises `CommandError` with code 1 unless all is done and well."""
        if self.open:
            raise CommandError(
                f"{self.open} jobs are still open after {limit:g} s; `headrace status` shows "
                "what they wait for",
                FAILED,
            )
        if self.failed:
            raise CommandError(
                f"{self.failed} jobs did not complete; `headrace jobs` lists them, `headrace logs "
                "JOB` says why",
                FAILED,
            )


async def wait_for(steady: Steady, jobs: Sequence[str], limit: float | None) -> Waited:
    """Wait until all of `jobs` have ended, all jobs that there are when it is empty.

    Args:
        steady: how to ask the server.
        jobs: their ids, as the server takes them.
        limit: seconds to wait at most; none for ever.

    Raises:
        CommandError: the server does not know one of them.
    """
    groups = [jobs[i : i + MAX_JOBS_ASKED] for i in range(0, len(jobs), MAX_JOBS_ASKED)] or [[]]
    answers = [Waited(len(group) or 1, 0) for group in groups]
    start, shortest = trio.current_time(), max(SHORTEST_PAUSE_SECS, PAUSE_SECS_A_JOB * len(jobs))
    with trio.move_on_after(float("inf") if limit is None else limit):
        while True:
            for i, group in enumerate(groups):
                # A group that has ended is not asked about again.
                if answers[i].open:
                    answers[i] = await _ask(steady, group)
            if not any(answer.open for answer in answers):
                break
            pause = PAUSE_SHARE * (trio.current_time() - start)
            await trio.sleep(min(max(pause, shortest), LONGEST_PAUSE_SECS))
    return Waited(sum(a.open for a in answers), sum(a.failed for a in answers))


async def _ask(steady: Steady, jobs: Sequence[str]) -> Waited:
    reply = await steady.ask(CmdWait(request=0, jobs=list(jobs)), CmdWaitReply)
    if reply.unknown:
        more = f" and {len(reply.unknown) - 1} more" if len(reply.unknown) > 1 else ""
        raise CommandError(f"no such job: {clean(reply.unknown[0])}{more}; see `headrace jobs`")
    return Waited(reply.open, reply.failed)
