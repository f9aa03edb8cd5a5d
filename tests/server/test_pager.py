"""The pager: lists, offers, and each candidate once to each session between two entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from actors.server.model import JobClass, PoolEntry, WorkerView, eligible
from actors.server.pager import Page, Pager, encode_candidate
from transport import messages as m
from transport.codec import Decoder, decode_value

DECODER = Decoder([m.JobListChunk, m.JobOffer])
LINUX = JobClass("build", "p", "x86_64-linux", frozenset(), False)


def view(**changes: Any) -> WorkerView:
    fields: dict[str, Any] = {
        "worker": "w",
        "can_fetch": True,
        "can_eval": True,
        "can_build": True,
        "has_capabilities": True,
        "architectures": frozenset({"x86_64-linux"}),
    }
    return WorkerView(**(fields | changes))


def entry(job_id: str, cls: JobClass = LINUX, paths: int = 0, size: int = 40) -> PoolEntry:
    required = tuple((f"/nix/store/{i:0{size}}", None) for i in range(paths))
    return PoolEntry(job_id=job_id, cls=cls, name=job_id, ready_at=0.0, required_paths=required)


def jobs(*numbers: int) -> list[str]:
    return [f"j{number:05}" for number in numbers]


def pages(pager: Pager, session: str) -> Iterator[Page]:
    """All that the session is sent now."""
    while (page := pager.next_page(session)) is not None:
        message = DECODER.decode(page.frame)
        assert isinstance(message, m.JobListChunk if page.is_list else m.JobOffer)
        assert [c.job_id for c in message.candidates] == list(page.job_ids)
        if isinstance(message, m.JobListChunk):
            assert message.is_final == page.is_final
        pager.check()
        yield page
    assert session not in pager.sendable()


def sent(pager: Pager, session: str) -> list[str]:
    return [job_id for page in pages(pager, session) for job_id in page.job_ids]


def listed(pager: Pager, session: str, **changes: Any) -> None:
    """A session that has its list."""
    pager.session_opened(session, view(**changes))
    pager.request_list(session)
    sent(pager, session)


@pytest.mark.parametrize(
    ("count", "lengths"),
    [(2500, [1000, 1000, 500]), (1000, [1000]), (0, [0]), (1001, [1000, 1])],
)
def test_a_list_comes_in_pages_and_only_the_last_is_final(count: int, lengths: list[int]) -> None:
    pager = Pager()
    for job_id in jobs(*range(count)):
        pager.enter(entry(job_id))
    pager.session_opened("s", view())
    pager.request_list("s")
    answer = list(pages(pager, "s"))
    assert [len(page.job_ids) for page in answer] == lengths
    assert [page.is_final for page in answer] == [False] * (len(lengths) - 1) + [True]
    assert all(page.is_list for page in answer)
    assert [job_id for page in answer for job_id in page.job_ids] == jobs(*range(count))


def test_pages_are_bounded_by_bytes_in_order_and_complete() -> None:
    pager = Pager()
    for job_id in jobs(*range(200)):
        pager.enter(entry(job_id, paths=300, size=60))
    pager.session_opened("s", view())
    pager.request_list("s")
    answer = list(pages(pager, "s"))
    assert len(answer) > 1
    assert max(len(page.frame) for page in answer) <= 2 * 2**20
    assert min(len(page.frame) for page in answer[:-1]) > 2 * 2**20 - 30_000
    assert [job_id for page in answer for job_id in page.job_ids] == jobs(*range(200))


def test_a_candidate_above_the_bound_goes_alone() -> None:
    pager = Pager(page_bytes=2000)
    for number, paths in enumerate((1, 100, 1)):
        pager.enter(entry(f"j{number}", paths=paths))
    pager.session_opened("s", view())
    pager.request_list("s")
    assert [page.job_ids for page in pages(pager, "s")] == [("j0",), ("j1",), ("j2",)]


def test_offers_hold_what_the_list_did_not() -> None:
    pager = Pager()
    pager.enter(entry("a"))
    listed(pager, "s")
    assert pager.sendable() == ()
    pager.enter(entry("b"))
    pager.enter(entry("c"))
    assert pager.sendable() == ("s",)
    (offer,) = pages(pager, "s")
    assert (offer.is_list, offer.job_ids) == (False, ("b", "c"))
    assert pager.next_page("s") is None


def test_what_enters_during_a_list_comes_after_it() -> None:
    pager = Pager(page_size=2)
    for job_id in "abcd":
        pager.enter(entry(job_id))
    pager.session_opened("s", view())
    pager.request_list("s")
    first = pager.next_page("s")
    pager.enter(entry("e"))
    pager.leave("d")
    rest = list(pages(pager, "s"))
    assert first is not None
    assert first.job_ids == ("a", "b")
    assert [(p.is_list, p.is_final, p.job_ids) for p in rest] == [
        (True, True, ("c",)),
        (False, False, ("e",)),
    ]


def test_a_list_whose_rest_left_ends_with_an_empty_page() -> None:
    pager = Pager(page_size=1)
    pager.enter(entry("a"))
    pager.enter(entry("b"))
    pager.session_opened("s", view())
    pager.request_list("s")
    first = pager.next_page("s")
    assert first is not None
    assert not first.is_final
    pager.leave("b")
    assert [(p.is_final, p.job_ids) for p in pages(pager, "s")] == [(True, ())]


def test_nothing_is_offered_before_the_first_request() -> None:
    pager = Pager()
    pager.session_opened("s", view())
    pager.enter(entry("a"))
    assert pager.sendable() == ()
    assert pager.next_page("s") is None


def test_requests_during_a_list_are_answered_by_one_more() -> None:
    pager = Pager(page_size=1)
    pager.enter(entry("a"))
    pager.enter(entry("b"))
    pager.session_opened("s", view())
    for _ in range(3):
        pager.request_list("s")
    assert pager.next_page("s") is not None
    for _ in range(3):
        pager.request_list("s")
    rest = list(pages(pager, "s"))
    assert [(p.is_final, p.job_ids) for p in rest] == [
        (True, ("b",)),
        (False, ("a",)),
        (True, ("b",)),
    ]


def test_a_job_that_comes_back_is_offered_to_everybody_again() -> None:
    pager = Pager()
    listed(pager, "s")
    listed(pager, "t")
    pager.enter(entry("a"))
    pager.enter(entry("a"))
    assert sent(pager, "s") == ["a"]
    assert sent(pager, "t") == ["a"]
    pager.leave("a")
    pager.enter(entry("a"))
    assert sent(pager, "s") == ["a"]
    assert sent(pager, "t") == ["a"]


def test_a_job_that_left_is_not_offered() -> None:
    pager = Pager()
    listed(pager, "s")
    pager.enter(entry("a"))
    pager.leave("a")
    pager.leave("a")
    assert sent(pager, "s") == []


def test_draining_ends_offers_and_lists() -> None:
    pager = Pager(page_size=1)
    pager.enter(entry("a"))
    pager.enter(entry("b"))
    listed(pager, "s", draining=True)
    pager.enter(entry("c"))
    assert pager.sendable() == ()
    pager.request_list("s")
    assert [(p.is_list, p.is_final, p.job_ids) for p in pages(pager, "s")] == [(True, True, ())]
    pager.session_changed("s", view())
    assert sent(pager, "s") == ["a", "b", "c"]
    pager.request_list("s")
    assert pager.next_page("s") is not None
    pager.session_changed("s", view(draining=True))
    assert [(p.is_list, p.is_final, p.job_ids) for p in pages(pager, "s")] == [(True, True, ())]


def test_other_projects_stay_unseen_until_authorized() -> None:
    pager = Pager()
    theirs = LINUX._replace(project="q")
    pager.enter(entry("a"))
    pager.enter(entry("b", theirs))
    listed(pager, "s", projects=frozenset({"p"}))
    pager.enter(entry("c", theirs))
    assert sent(pager, "s") == []
    pager.session_changed("s", view(projects=frozenset({"p", "q"})))
    assert sent(pager, "s") == ["b", "c"]


def test_a_class_that_was_lost_and_comes_back_is_not_repeated() -> None:
    pager = Pager()
    pager.enter(entry("a"))
    listed(pager, "s")
    pager.session_changed("s", view(architectures=frozenset()))
    pager.enter(entry("b"))
    assert sent(pager, "s") == []
    pager.session_changed("s", view())
    assert sent(pager, "s") == ["b"]


def test_a_session_that_returns_starts_anew() -> None:
    pager = Pager()
    pager.enter(entry("a"))
    listed(pager, "s")
    pager.session_closed("s")
    pager.session_opened("s", view())
    assert sent(pager, "s") == []
    pager.request_list("s")
    assert sent(pager, "s") == ["a"]


def test_after_a_restart_listed_sessions_are_offered_everything() -> None:
    pager = Pager()
    pager.enter(entry("a"))
    pager.session_opened("s", view(), listed=True)
    assert [(p.is_list, p.job_ids) for p in pages(pager, "s")] == [(False, ("a",))]


def test_a_blocked_page_is_made_anew() -> None:
    pager = Pager(page_size=2)
    listed(pager, "s")
    for job_id in "abc":
        pager.enter(entry(job_id))
    page = pager.next_page("s")
    assert page is not None
    pager.blocked("s", page)
    pager.check()
    assert pager.sendable() == ()
    assert pager.next_page("s") is None
    pager.leave("a")
    pager.leave("b")
    pager.enter(entry("b"))
    pager.unblocked("s")
    assert [p.job_ids for p in pages(pager, "s")] == [("c", "b")]


def test_a_blocked_final_page_is_still_owed() -> None:
    pager = Pager()
    pager.enter(entry("a"))
    pager.session_opened("s", view())
    pager.request_list("s")
    page = pager.next_page("s")
    assert page is not None
    pager.blocked("s", page)
    pager.leave("a")
    pager.enter(entry("b"))
    pager.unblocked("s")
    assert [(p.is_list, p.is_final, p.job_ids) for p in pages(pager, "s")] == [
        (True, True, ()),
        (False, False, ("b",)),
    ]


def test_what_happens_to_a_session_that_is_over_is_ignored() -> None:
    pager = Pager()
    listed(pager, "s")
    pager.enter(entry("a"))
    page = pager.next_page("s")
    assert page is not None
    pager.session_closed("s")
    pager.blocked("s", page)
    pager.unblocked("s")
    pager.session_changed("s", view())
    pager.request_list("s")
    pager.session_closed("s")
    assert pager.next_page("s") is None
    pager.check()


def test_sessions_take_turns() -> None:
    pager = Pager(page_size=1)
    listed(pager, "s")
    listed(pager, "t")
    for job_id in "ab":
        pager.enter(entry(job_id))
    turns = []
    while ready := pager.sendable():
        turns += [(name, p.job_ids) for name in ready if (p := pager.next_page(name))]
    assert turns == [("s", ("a",)), ("t", ("a",)), ("s", ("b",)), ("t", ("b",))]


def test_empty_classes_are_forgotten_but_nothing_is_missed() -> None:
    pager = Pager()
    listed(pager, "s")
    for number in range(300):
        pager.enter(entry(f"j{number}", LINUX._replace(project=f"p{number % 100}")))
        assert sent(pager, "s") == [f"j{number}"]
        pager.leave(f"j{number}")
        pager.check()


def test_a_candidate_tells_what_a_worker_needs() -> None:
    build = PoolEntry(
        job_id="b",
        cls=LINUX._replace(features=frozenset({"kvm", "big-parallel"})),
        name="hello",
        ready_at=0.0,
        required_paths=(("/nix/store/a", 7), ("/nix/store/b", None)),
        drv_paths=("/nix/store/hello.drv",),
        output_paths=("/nix/store/hello",),
    )
    assert decode_value(encode_candidate(build)) == {
        "job_id": "b",
        "kind": "build",
        "project": "p",
        "required_paths": [{"path": "/nix/store/a", "nar_size": 7}, {"path": "/nix/store/b"}],
        "drv_paths": ["/nix/store/hello.drv"],
        "output_paths": ["/nix/store/hello"],
        "requirement": {"system": "x86_64-linux", "required_features": ["big-parallel", "kvm"]},
    }
    evaluation = entry("e", JobClass("eval", "p", "", frozenset(), True))
    assert decode_value(encode_candidate(evaluation)) == {
        "job_id": "e",
        "kind": "eval",
        "project": "p",
        "required_paths": [],
        "drv_paths": [],
        "output_paths": [],
    }


# -- against a model that remembers every job it sent ------------------------------------------

CLASSES = [
    JobClass("build", project, system, frozenset(), False)
    for project in "pq"
    for system in ("x86_64-linux", "builtin")
]
VIEWS = st.builds(
    view,
    architectures=st.sampled_from([frozenset(), frozenset({"x86_64-linux"})]),
    projects=st.sampled_from([None, frozenset("p"), frozenset("q")]),
    draining=st.sampled_from([False, False, False, True]),
)


class Listing:
    """A list under way: what must be in it, unless it stops being a candidate, and what was."""

    def __init__(self, owed: set[tuple[str, int]]) -> None:
        self.owed = owed
        self.had: set[str] = set()


class Peer:
    def __init__(self, seen: WorkerView) -> None:
        self.view = seen
        self.sent: set[tuple[str, int]] = set()
        self.listed = False
        self.asked = False
        self.listing: Listing | None = None
        self.blocked = False


class PagerMachine(RuleBasedStateMachine):
    sessions = Bundle("sessions")

    @initialize(page_size=st.integers(1, 4), page_bytes=st.sampled_from([300, 10_000]))
    def start(self, page_size: int, page_bytes: int) -> None:
        self.pager = Pager(page_size, page_bytes)
        self.page_size = page_size
        self.pending: dict[str, tuple[JobClass, int]] = {}
        self.entries = 0
        self.peers: dict[str, Peer] = {}
        self.opened = 0

    def candidates(self, peer: Peer) -> set[tuple[str, int]]:
        return {(j, e) for j, (cls, e) in self.pending.items() if eligible(cls, peer.view)}

    def narrow(self) -> None:
        """What stops being a candidate is not owed any more, also if it becomes one again."""
        for peer in self.peers.values():
            if peer.listing is not None:
                peer.listing.owed &= self.candidates(peer)
                if peer.view.draining:
                    peer.listing.owed = set()

    @rule(number=st.integers(0, 11), cls=st.sampled_from(CLASSES), paths=st.integers(0, 4))
    def enter(self, number: int, cls: JobClass, paths: int) -> None:
        job_id = f"j{number:02}"
        self.pager.enter(entry(job_id, cls, paths))
        if job_id not in self.pending:
            self.entries += 1
            self.pending[job_id] = (cls, self.entries)

    @rule(number=st.integers(0, 11))
    def leave(self, number: int) -> None:
        self.pager.leave(f"j{number:02}")
        self.pending.pop(f"j{number:02}", None)
        self.narrow()

    @rule(target=sessions, seen=VIEWS)
    def open(self, seen: WorkerView) -> str:
        self.opened += 1
        name = f"s{self.opened}"
        self.pager.session_opened(name, seen)
        self.peers[name] = Peer(seen)
        return name

    @rule(name=sessions, seen=VIEWS)
    def change(self, name: str, seen: WorkerView) -> None:
        self.pager.session_changed(name, seen)
        self.peers[name].view = seen
        self.narrow()

    @rule(name=consumes(sessions))
    def close(self, name: str) -> None:
        self.pager.session_closed(name)
        del self.peers[name]

    @rule(name=sessions)
    def request(self, name: str) -> None:
        self.pager.request_list(name)
        self.peers[name].listed = self.peers[name].asked = True

    @rule(name=sessions, full=st.sampled_from([False, False, True]))
    def send(self, name: str, full: bool) -> None:
        page = self.pager.next_page(name)
        peer = self.peers[name]
        if page is None:
            return
        assert not peer.blocked
        begins = page.is_list and peer.listing is None
        if begins:
            assert peer.asked
            peer.asked = False
            owed = set() if peer.view.draining else self.candidates(peer)
            peer.listing = Listing(owed)
        if full:
            self.pager.blocked(name, page)
            peer.blocked = True
            return
        self.take(peer, page)

    def take(self, peer: Peer, page: Page) -> None:
        assert peer.listed
        now = self.candidates(peer)
        got = {(job_id, self.pending[job_id][1]) for job_id in page.job_ids}
        assert len(got) == len(page.job_ids) <= self.page_size
        assert got <= now
        assert not (got and peer.view.draining)
        if page.is_list:
            listing = peer.listing
            assert listing is not None
            ids = {job_id for job_id, _ in got}
            assert not ids & listing.had
            listing.had |= ids
            listing.owed -= got
            if page.is_final:
                assert not listing.owed
                peer.listing = None
        else:
            assert peer.listing is None
            assert page.job_ids
            assert not got & peer.sent
        peer.sent |= got

    @precondition(lambda self: any(peer.blocked for peer in self.peers.values()))
    @rule()
    def unblock(self) -> None:
        for name, peer in self.peers.items():
            peer.blocked = False
            self.pager.unblocked(name)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "pager"):
            self.pager.check()

    def teardown(self) -> None:
        if not hasattr(self, "pager"):
            return
        for name, peer in self.peers.items():
            self.pager.unblocked(name)
            peer.blocked = False
        for _ in range(200):
            for name in self.pager.sendable():
                self.send(name, full=False)
            self.pager.check()
        assert self.pager.sendable() == ()
        for peer in self.peers.values():
            assert peer.listing is None
            assert not peer.asked
            if peer.listed and not peer.view.draining:
                assert self.candidates(peer) <= peer.sent


PagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPagerAgainstModel = PagerMachine.TestCase
