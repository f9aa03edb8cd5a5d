"""Actors that fail, alone and together, and when it is enough."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from actors.supervision import Child, GaveUp, Intensity, Supervisor


def test_intensity_counts_a_window_and_names_apart():
    intensity = Intensity(limit=2, window=10.0)
    assert [intensity.failed("a", t) for t in (0.0, 1.0, 2.0)] == [True, True, False]
    assert intensity.failed("b", 2.0)
    assert intensity.failed("a", 11.5)
    assert intensity.restarts == {"a": 4, "b": 1}


async def test_an_actor_is_restarted_alone_and_its_sibling_lives_on(autojump_clock: MockClock):
    lives = {"bad": 0, "good": 0}

    async def good():
        lives["good"] += 1
        await trio.sleep_forever()

    async def bad():
        lives["bad"] += 1
        if lives["bad"] < 4:
            await trio.sleep(1)
            raise ValueError("no")
        await trio.sleep_forever()

    supervisor = Supervisor([Child("good", good), Child("bad", bad)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await trio.sleep(30)
        nursery.cancel_scope.cancel()
    assert lives == {"bad": 4, "good": 1}
    assert supervisor.intensity.restarts == {"bad": 3}


@pytest.mark.parametrize("failing", [1, 2, 3])
async def test_however_many_fail_at_once_and_in_groups_too(autojump_clock: MockClock, failing):
    lives = [0] * 3

    def make(number):
        async def run():
            lives[number] += 1
            if lives[number] == 1 and number < failing:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.sleep_forever)
                    raise OSError("inside a group")
            await trio.sleep_forever()

        return run

    supervisor = Supervisor([Child(f"a{n}", make(n)) for n in range(3)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert lives == [2 if n < failing else 1 for n in range(3)]


async def test_too_many_failures_end_it_with_one_line_that_names_actor_and_cause(
    autojump_clock: MockClock,
):
    async def run():
        await trio.sleep(0.1)
        raise KeyError("lost")

    with pytest.RaisesGroup(GaveUp) as caught:
        await Supervisor([Child("pager", run)]).run()
    text = str(caught.value.exceptions[0])
    assert "pager" in text
    assert "KeyError: 'lost'" in text


async def test_a_killed_actor_is_counted_for_whom_it_was_killed(autojump_clock: MockClock):
    supervisor = Supervisor([Child("dispatch", trio.sleep_forever)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await trio.sleep(1)
        assert supervisor.kill("dispatch", counted_as="assigner")
        await trio.sleep(1)
        assert not supervisor.kill("nobody")
        nursery.cancel_scope.cancel()
    assert supervisor.intensity.restarts == {"assigner": 1}


async def test_what_no_restart_helps_against_ends_all_at_once():
    class Lost(Exception):
        pass

    lives = 0

    async def run():
        nonlocal lives
        lives += 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)

    async def fail():
        raise Lost("the disk is gone")

    with pytest.raises(ExceptionGroup) as group:
        await Supervisor([Child("ledger", run, fatal=(Lost,))]).run()
    assert group.group_contains(GaveUp, match="actor ledger cannot go on: the disk is gone")
    assert lives == 1
