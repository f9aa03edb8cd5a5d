"""Actors that fail or hang, alone and together, and when it is enough."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock

from actors.hangs import HangWatch, Inlet
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


@pytest.mark.parametrize("failing", [1, 2, 3])
@pytest.mark.parametrize("when", ["at start", "later", "at the end"])
async def test_when_and_with_whom_it_fails_makes_no_difference(
    autojump_clock: MockClock, caplog, failing, when
):
    lives = [0] * 3

    def make(number):
        async def run():
            lives[number] += 1
            if lives[number] > 1 or number >= failing:
                await trio.sleep_forever()
            if when == "at start":
                raise ExceptionGroup("two", [OSError(f"first {number}"), KeyError("second")])
            try:
                await trio.sleep(5 if when == "later" else 1_000)
            finally:
                if when == "at the end":
                    raise OSError(f"first {number}")
            raise OSError(f"first {number}")

        return run

    supervisor = Supervisor([Child(f"a{n}", make(n)) for n in range(3)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await trio.sleep(8)
        nursery.cancel_scope.cancel()
    again = 1 if when != "at the end" else 0
    assert lives == [1 + again if n < failing else 1 for n in range(3)]
    assert supervisor.intensity.restarts == {f"a{n}": 1 for n in range(failing)} or not again
    causes = [str(r.exc_info[1]) for r in caplog.records if r.levelno == logging.ERROR]
    for number in range(failing):
        assert causes.count(f"first {number}") == 1


# -- hanging ---------------------------------------------------------------------------------------


class Box:
    """A channel as supervision sees it."""

    def __init__(self) -> None:
        self.taken = 0
        self.nudges = 0
        self.in_thread = False
        self.inlet = Inlet("box", lambda: self.taken, self.nudge, lambda: self.in_thread)

    def nudge(self) -> None:
        self.nudges += 1


def test_only_an_inlet_that_does_not_move_is_a_hang():
    box, watch = Box(), HangWatch(limit=3)
    for _ in range(4):
        assert [watch.look(box.inlet) for _ in range(3)] == [False] * 3
        box.taken += 1
    assert box.nudges == 12
    box.in_thread = True
    assert not any(watch.look(box.inlet) for _ in range(10))
    box.in_thread = False
    assert [watch.look(box.inlet) for _ in range(3)] == [False, False, True]
    box.taken += 1
    assert not watch.look(box.inlet)


@pytest.mark.parametrize("hanging", [1, 2, 3])
async def test_whoever_hangs_is_restarted_within_15_seconds_and_counted(
    autojump_clock: MockClock, caplog, hanging
):
    boxes = [Box() for _ in range(3)]
    is_hanging = False

    def make(box):
        lives = 0

        async def run():
            nonlocal lives
            lives += 1
            while lives > 1 or not is_hanging or box not in boxes[:hanging]:
                await trio.sleep(0.5)
                box.taken += 1
            await trio.sleep_forever()

        return run

    children = [Child(f"a{n}", make(box), inlets=(box.inlet,)) for n, box in enumerate(boxes)]
    supervisor = Supervisor(children)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await trio.sleep(60)
        assert supervisor.intensity.restarts == {}
        is_hanging = True
        await trio.sleep(15)
        assert supervisor.intensity.restarts == {f"a{n}": 1 for n in range(hanging)}
        nursery.cancel_scope.cancel()
    for number in range(hanging):
        assert f"actor a{number} is restarted: it hung: nothing taken from its box" in caplog.text


async def test_an_actor_that_cannot_be_cancelled_ends_the_process(autojump_clock: MockClock):
    box, lines = Box(), []
    released = trio.Event()

    async def run():
        with trio.CancelScope(shield=True):
            await released.wait()

    def end_process(line):
        lines.append(line)
        released.set()

    with pytest.raises(trio.TooSlowError):
        with trio.fail_after(1):
            await Supervisor([Child("pager", trio.sleep_forever)], end_process).run()
    with pytest.RaisesGroup(GaveUp):
        await Supervisor([Child("pager", run, inlets=(box.inlet,))], end_process).run()
    [line] = lines
    assert "pager" in line
    assert "does not end" in line


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
