"""The reaper core: who is accused, at which moment, and who never."""

from __future__ import annotations

import pytest

from actors.server.effects import PeerGone, PingDue, Silent
from actors.server.reaper import STALL_GRACE_SECS, SWEEP_SECS, Reaper
from actors.server.sessions import Session
from tests.server.farm_harness import BUILD


def session(last_seen: float, *, holds_claims: bool = False) -> Session:
    return Session(
        id="s", peer=b"p", worker="w", name="w", agent="", asked=BUILD, capabilities=BUILD,
        projects=None, last_seen=last_seen, holds_claims=holds_claims,
    )  # fmt: skip


def sweeps(reaper: Reaper, sessions: list[Session], start: float, end: float):
    """All accusations of regular sweeps from `start` to `end`."""
    now, accused = start, []
    while now <= end:
        accused += [(now, a) for a in reaper.sweep(sessions, [], now)]
        now += SWEEP_SECS
    return accused


def test_silence_is_too_long_just_after_the_limit():  # 107
    reaper = Reaper(120.0, 0.0)
    assert sweeps(reaper, [session(0.0)], 0.5, 120.0) == []
    assert reaper.sweep([session(0.0)], [], 120.001) == [Silent("s", 0.0)]


@pytest.mark.parametrize("draining", [True, False])
def test_it_is_repeated_until_dispatch_heeds_it_whoever_drains(draining):  # 111
    reaper, silent = Reaper(120.0, 0.0), session(0.0)
    silent.draining = draining
    sweeps(reaper, [silent], 0.5, 120.0)
    assert len(sweeps(reaper, [silent], 120.5, 122.0)) == 4


def test_a_timeout_of_zero_accuses_nobody():  # 109
    assert sweeps(Reaper(0.0, 0.0), [session(0.0)], 0.5, 5_000.0) == []


def test_who_holds_claims_is_pinged_every_two_seconds_of_silence():
    reaper, holder = Reaper(120.0, 0.0), session(0.0, holds_claims=True)
    assert sweeps(reaper, [holder], 0.5, 1.5) == []
    assert sweeps(reaper, [holder], 2.0, 2.0) == [(2.0, PingDue("s"))]
    holder.pinged_at = 2.0
    assert [at for at, _ in sweeps(reaper, [holder], 2.5, 4.0)] == [4.0]
    holder.pinged_at, holder.last_seen = 4.0, 5.5
    assert sweeps(reaper, [holder], 4.5, 7.0) == []


def test_a_new_reaper_judges_nobody_by_what_was_before_it():
    reaper, old = Reaper(1.0, 1_000.0), session(0.0)
    assert sweeps(reaper, [old], 1_000.5, 1_000.0 + STALL_GRACE_SECS - 0.5) == []
    assert reaper.sweep([old], [], 1_000.0 + STALL_GRACE_SECS) == [Silent("s", 0.0)]


def test_after_a_stall_of_the_server_everybody_has_time_to_be_read():  # 112
    reaper, worker = Reaper(120.0, 0.0), session(0.0)
    sweeps(reaper, [worker], 0.5, 100.0)
    assert sweeps(reaper, [worker], 160.0, 160.0 + STALL_GRACE_SECS - 0.5) == []
    assert reaper.sweep([worker], [], 160.0 + STALL_GRACE_SECS) == [Silent("s", 0.0)]


def test_sweeps_that_are_a_little_late_are_no_stall():
    reaper, worker = Reaper(120.0, 0.0), session(0.0)
    now = 0.0
    while now < 120.0:
        now += SWEEP_SECS + 1.9
        accused = reaper.sweep([worker], [], now)
    assert accused == [Silent("s", 0.0)]


def test_peers_that_take_nothing_are_gone_session_or_not():
    reaper = Reaper(120.0, 0.0)
    assert reaper.sweep([], [b"command", b"p"], 0.5) == [PeerGone(b"command"), PeerGone(b"p")]
