"""The outbox: order, bounds, and peers that are full or gone, over a router that does as told."""

from __future__ import annotations

import pytest

from actors.server.outbox import MAX_QUEUED, MAX_QUEUED_BYTES, Outbox
from transport.interface import Sent


class Router:
    def __init__(self) -> None:
        self.room: dict[bytes, int] = {}
        """How many messages a peer still takes; without an entry, any number."""
        self.gone: set[bytes] = set()
        self.sent: list[tuple[bytes, list[bytes]]] = []

    def send(self, peer: bytes, frames: list[bytes]) -> Sent:
        if peer in self.gone:
            return Sent.GONE
        if not self.room.get(peer, 1):
            return Sent.FULL
        if peer in self.room:
            self.room[peer] -= 1
        self.sent.append((peer, list(frames)))
        return Sent.OK


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def outbox(router: Router) -> Outbox:
    return Outbox(router)


def test_frames_travel_together_in_messages_of_at_most_256(outbox, router):
    frames = [bytes([n % 256]) for n in range(600)]
    assert outbox.send(b"p", frames, 0.0) is Sent.OK
    assert [len(message) for _, message in router.sent] == [256, 256, 88]
    assert [frame for _, message in router.sent for frame in message] == frames


def test_what_a_full_peer_does_not_take_waits_in_order_and_holds_nobody_up(outbox, router):
    router.room[b"p"] = 1
    assert [outbox.send(b"p", [b"%d" % n], 0.0) for n in range(4)] == [Sent.OK, *[Sent.FULL] * 3]
    assert outbox.send(b"q", [b"x"], 0.0) is Sent.OK
    router.room[b"p"] = 2
    assert outbox.flush(1.0) == []
    assert len(outbox) == 1
    assert outbox.send(b"p", [b"4"], 1.0) is Sent.FULL, "not past what waits"
    del router.room[b"p"]
    assert outbox.flush(2.0) == []
    assert len(outbox) == 0
    assert [f[0] for peer, f in router.sent if peer == b"p"] == [b"0", b"1", b"2", b"3", b"4"]


def test_a_page_is_not_queued_and_does_not_overtake(outbox, router):
    router.room[b"p"] = 0
    assert outbox.send_page(b"p", b"page") is Sent.FULL
    assert len(outbox) == 0
    outbox.send(b"p", [b"first"], 0.0)
    router.room[b"p"] = 5
    assert outbox.send_page(b"p", b"page") is Sent.FULL
    outbox.flush(0.0)
    assert outbox.send_page(b"p", b"page") is Sent.OK
    assert [f for _, f in router.sent] == [[b"first"], [b"page"]]


def test_too_many_messages_for_a_full_peer_are_its_end(outbox, router):
    router.room[b"p"] = 0
    for _ in range(MAX_QUEUED):
        assert outbox.send(b"p", [b"x"], 0.0) is Sent.FULL
    assert outbox.send(b"p", [b"x"], 0.0) is Sent.GONE
    assert len(outbox) == 0
    assert outbox.undeliverable == 1


def test_too_many_bytes_for_a_full_peer_are_its_end(outbox, router):
    router.room[b"p"] = 0
    half = bytes(MAX_QUEUED_BYTES // 2)
    assert outbox.send(b"p", [half], 0.0) is Sent.FULL
    assert outbox.send(b"p", [half], 0.0) is Sent.FULL
    assert outbox.send(b"p", [b"x"], 0.0) is Sent.GONE


def test_bytes_that_went_out_count_no_more(outbox, router):
    router.room[b"p"] = 0
    half = bytes(MAX_QUEUED_BYTES // 2)
    for _ in range(20):
        assert outbox.send(b"p", [half], 0.0) is Sent.FULL
        outbox.send(b"p", [b"x"], 0.0)
        router.room[b"p"] = 2
        outbox.flush(0.0)
        router.room[b"p"] = 0


def test_a_peer_that_is_gone_is_reported_by_the_send_and_by_the_flush(outbox, router):
    router.room[b"p"] = router.room[b"q"] = 0
    outbox.send(b"p", [b"x"], 0.0)
    outbox.send(b"q", [b"x"], 0.0)
    router.gone = {b"p", b"z"}
    assert outbox.send(b"z", [b"x"], 0.0) is Sent.GONE
    assert outbox.flush(0.0) == [b"p"]
    assert len(outbox) == 1
    assert outbox.undeliverable == 1


def test_only_who_takes_nothing_at_all_is_stuck(outbox, router):
    for peer in (b"dead", b"slow"):
        router.room[peer] = 0
        for _ in range(30):
            outbox.send(peer, [b"x"], 0.0)
    for second in range(1, 21):
        router.room[b"slow"] = 1
        outbox.flush(float(second))
    assert outbox.stuck(before=10.0) == [b"dead"]
    outbox.drop(b"dead")
    assert outbox.stuck(before=100.0) == [b"slow"]
    outbox.drop(b"nobody")
