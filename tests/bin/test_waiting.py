from __future__ import annotations

import pytest

from bin import waiting
from bin.client import steady
from bin.errors import CommandError
from bin.waiting import Waited, wait_for
from transport import messages as m


def reply(still_open: int, failed: int = 0, unknown=()) -> m.CmdWaitReply:
    return m.CmdWaitReply(request=0, open=still_open, failed=failed, unknown=list(unknown))


@pytest.fixture
async def asker(server):
    async with steady(server, "tcp://127.0.0.1:1", 1, lambda _: None) as made:
        yield made


async def test_it_asks_until_all_have_ended(autojump_clock, server, asker):
    server.on(m.CmdWait, reply(2), reply(1), reply(0, failed=1))
    assert await wait_for(asker, ["a", "b"], None) == Waited(0, 1)
    assert [r.jobs for r in server.requests] == [["a", "b"]] * 3


async def test_time_is_up(autojump_clock, server, asker):
    server.on(m.CmdWait, reply(2, failed=1))
    assert await wait_for(asker, [], 10) == Waited(2, 1)


@pytest.mark.parametrize(
    ("jobs", "seconds", "asked"), [(1, 1, 20), (1, 1_000, 1_160), (50_000, 10, 100)]
)
async def test_the_longer_it_takes_and_the_more_jobs_the_rarer_it_asks(
    autojump_clock, server, asker, jobs, seconds, asked
):
    server.on(m.CmdWait, reply(1))
    await wait_for(asker, [f"j{n}" for n in range(jobs)], seconds)
    assert len(server.requests) == pytest.approx(asked, rel=0.1)


async def test_an_unknown_job(server, asker):
    server.on(m.CmdWait, reply(0, unknown=["x", "y"]))
    with pytest.raises(CommandError, match="no such job: x and 1 more"):
        await wait_for(asker, ["x", "y"], None)


async def test_many_jobs_are_asked_for_in_groups(autojump_clock, server, asker, monkeypatch):
    monkeypatch.setattr(waiting, "MAX_JOBS_ASKED", 2)
    server.on(m.CmdWait, reply(0, failed=1), reply(1), reply(0, failed=2))
    assert await wait_for(asker, ["a", "b", "c"], None) == Waited(0, 3)
    assert [r.jobs for r in server.requests] == [["a", "b"], ["c"], ["c"]]


async def test_a_restart_in_between(autojump_clock, server, asker, cut):
    server.on(m.CmdWait, reply(1), lambda _: [cut], reply(0))
    assert await wait_for(asker, ["a"], None) == Waited(0, 0)
