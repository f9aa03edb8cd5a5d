"""The pager core: which session was sent which candidate, and the pages to send next.

Theory of operation. Candidates of one class (see `JobClass`) have the same audience, so each class
keeps one log: its pending candidates in the order they entered, each with a sequence number that
no other entry ever has. A session remembers per class the number up to which it was sent the log;
there are no sets of sent jobs, and a session costs as much memory as there are classes.

- A job that leaves is struck out of its log. One that comes back enters at the end, behind every
  session's mark, and is so offered again to all.
- A full list walks the same logs from their start with marks of its own, up to the last number
  given out when it began. What enters meanwhile comes as offers after it. Whatever a list sends
  moves the session's marks too.
- A session that was sent a whole log waits at it (`_Log.waiting`), else the log is among the
  session's `todo`. An entry moves those that wait, once; the next ones find nobody. So entries
  cost nothing for idle sessions, and a turn looks at changed logs only.
- A page that could not be sent is taken back: the marks return to where they were before it.
  When the session is unblocked the page is made anew, without what left meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct, structs

from actors.server.model import JobClass, PoolEntry, WorkerView, eligible
from transport import codec
from transport.messages import MAX_PAGE_BYTES, MAX_PAGE_CANDIDATES

_HEAD_BYTES = 64
"""More than a page takes beside its candidates."""
_KEPT_LOGS = 64
"""Empty logs that are remembered: the last job of a class leaves and the next one enters."""


class Page(Struct, frozen=True):
    """A `JobListChunk` or `JobOffer`, ready to be sent."""

    frame: bytes
    is_list: bool
    is_final: bool
    """The last page of a list."""
    job_ids: tuple[str, ...]


def encode_candidate(entry: PoolEntry) -> bytes:
    """The `JobCandidate` of a job, to be spliced into pages."""
    # A plain map: with 20 paths half the time of building and taking apart the Structs.
    candidate: dict[str, Any] = {
        "job_id": entry.job_id,
        "kind": entry.cls.kind,
        "project": entry.cls.project,
        "required_paths": [
            {"path": path} if size is None else {"path": path, "nar_size": size}
            for path, size in entry.required_paths
        ],
        "drv_paths": entry.drv_paths,
        "output_paths": entry.output_paths,
    }
    if entry.cls.kind == "build":
        candidate["requirement"] = {
            "system": entry.cls.system,
            "required_features": sorted(entry.cls.features),
        }
    return codec.encode_value(candidate)


@dataclass(slots=True, eq=False)
class _Log:
    """The pending candidates of one class: parallel lists in ascending order of `seqs`."""

    cls: JobClass
    seqs: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    fragments: list[bytes | None] = field(default_factory=list)
    """Encoded candidates; None = struck out."""
    live: int = 0
    waiting: dict[str, None] = field(default_factory=dict)
    """Eligible sessions that were sent everything."""

    def append(self, seq: int, job_id: str, fragment: bytes) -> None:
        self.seqs.append(seq)
        self.ids.append(job_id)
        self.fragments.append(fragment)
        self.live += 1

    def strike(self, seq: int) -> None:
        self.fragments[bisect_right(self.seqs, seq) - 1] = None
        self.live -= 1
        if len(self.seqs) > 2 * self.live + 32:
            kept = [at for at, fragment in enumerate(self.fragments) if fragment is not None]
            self.seqs = [self.seqs[at] for at in kept]
            self.ids = [self.ids[at] for at in kept]
            self.fragments = [self.fragments[at] for at in kept]


@dataclass(slots=True)
class _Listing:
    """A full list under way."""

    bound: int
    """It has what was pending with numbers up to this one."""
    marks: dict[JobClass, int]
    """By class that the list covers: how far it came."""


@dataclass(slots=True)
class _Before:
    """What a page changed, to take it back."""

    page: Page
    marks: dict[JobClass, int]
    listing: _Listing | None


@dataclass(slots=True, eq=False)
class _Session:
    view: WorkerView
    eligible: dict[JobClass, None] = field(default_factory=dict)
    marks: dict[JobClass, int] = field(default_factory=dict)
    """By class: up to which number it was sent the log. Kept when the class is lost, so that
    nothing is sent twice when it comes back."""
    todo: dict[JobClass, None] = field(default_factory=dict)
    """Eligible classes that may hold something not sent yet."""
    listed: bool = False
    listing: _Listing | None = None
    list_again: bool = False
    blocked: bool = False
    before: _Before | None = None

    @property
    def has_work(self) -> bool:
        if self.blocked or not self.listed:
            return False
        if self.listing is not None or self.list_again:
            return True
        return bool(self.todo) and not self.view.draining


class Pager:
    """See above. Events come in through the methods; pages are asked for, one session a time.

    What is said of a session that is over is ignored: a send may have found it gone first.
    """

    def __init__(
        self, page_size: int = MAX_PAGE_CANDIDATES, page_bytes: int = MAX_PAGE_BYTES
    ) -> None:
        assert 1 <= page_size <= MAX_PAGE_CANDIDATES
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._seq = 0
        self._logs: dict[JobClass, _Log] = {}
        self._empty_logs: dict[JobClass, None] = {}
        self._jobs: dict[str, tuple[_Log, int]] = {}
        self._sessions: dict[str, _Session] = {}
        self._ready: dict[str, None] = {}
        """Sessions with work, the longest unserved first."""
        self._last: tuple[list[bytes], Page] = ([], Page(b"", False, False, ()))
        """The newest page and the fragments in it: sessions side by side get the same ones."""

    def __len__(self) -> int:
        """Pending candidates."""
        return len(self._jobs)

    # -- events ----------------------------------------------------------------------------

    def enter(self, entry: PoolEntry, fragment: bytes | None = None) -> None:
        """The job is pending; `fragment` is its candidate if that is encoded already. Ignored
        when it was pending before."""
        if entry.job_id in self._jobs:
            return
        log = self._logs.get(entry.cls)
        if log is None:
            log = self._add_log(entry.cls)
        self._empty_logs.pop(entry.cls, None)
        self._seq += 1
        log.append(self._seq, entry.job_id, fragment or encode_candidate(entry))
        self._jobs[entry.job_id] = (log, self._seq)
        for name in log.waiting:
            session = self._sessions[name]
            session.todo[entry.cls] = None
            self._refresh(name, session)
        log.waiting.clear()

    def leave(self, job_id: str) -> None:
        """The job is not pending any more. Ignored when it was not."""
        found = self._jobs.pop(job_id, None)
        if found is None:
            return
        log, seq = found
        log.strike(seq)
        if log.live:
            return
        self._empty_logs[log.cls] = None
        if len(self._empty_logs) > _KEPT_LOGS:
            self._drop_log(next(iter(self._empty_logs)))

    def session_opened(self, name: str, view: WorkerView, *, listed: bool = False) -> None:
        """A session begins. One that is `listed` asked for a list before this pager began: it is
        offered everything, without a list."""
        assert name not in self._sessions
        session = self._sessions[name] = _Session(view, listed=listed)
        self._set_eligible(name, session)
        self._refresh(name, session)

    def session_changed(self, name: str, view: WorkerView) -> None:
        """Its capabilities, rights or draining are other than before."""
        session = self._sessions.get(name)
        if session is None:
            return
        session.view = view
        self._set_eligible(name, session)
        self._refresh(name, session)

    def session_closed(self, name: str) -> None:
        """The session is over."""
        session = self._sessions.pop(name, None)
        if session is None:
            return
        for cls in session.eligible:
            self._logs[cls].waiting.pop(name, None)
        self._ready.pop(name, None)

    def request_list(self, name: str) -> None:
        """The session wants the full list; while one is under way, one more after it."""
        session = self._sessions.get(name)
        if session is None:
            return
        session.listed = True
        session.list_again = True
        self._refresh(name, session)

    def blocked(self, name: str, page: Page) -> None:
        """The session's last page could not be sent: it is taken back, and the session gets
        none until `unblocked`."""
        session = self._sessions.get(name)
        if session is None:
            return
        before = session.before
        assert before is not None
        assert before.page is page
        session.before = None
        session.blocked = True
        for cls, mark in before.marks.items():
            if cls in self._logs:
                session.marks[cls] = mark
            if cls in session.eligible:
                self._logs[cls].waiting.pop(name, None)
                session.todo[cls] = None
        session.listing = before.listing
        self._refresh(name, session)

    def unblocked(self, name: str) -> None:
        """The session takes pages again."""
        session = self._sessions.get(name)
        if session is not None:
            session.blocked = False
            self._refresh(name, session)

    # -- output ----------------------------------------------------------------------------

    def sendable(self) -> Sequence[str]:
        """Sessions with something to send, the longest unserved first. A turn is one
        `next_page` for each; what a turn finds is no promise that a page comes of it."""
        return tuple(self._ready)

    def next_page(self, name: str) -> Page | None:
        """The session's next page, which counts as sent unless `blocked` follows."""
        session = self._sessions.get(name)
        if session is None or not session.has_work:
            return None
        if session.listing is None and session.list_again:
            session.list_again = False
            session.listing = _Listing(self._seq, dict.fromkeys(session.eligible, 0))
        session.before = None
        page = self._offer(name, session) if session.listing is None else self._chunk(session)
        self._ready.pop(name, None)  # to the end of the turn
        self._refresh(name, session)
        return page

    def _chunk(self, session: _Session) -> Page:
        listing = session.listing
        assert listing is not None
        draft = _Draft(self._page_size, self._page_bytes)
        marks: dict[JobClass, int] = {}
        more = False
        # A worker that drains is offered nothing, but a list it waits for must end.
        for cls in () if session.view.draining else listing.marks:
            log = self._logs.get(cls)
            if log is None or cls not in session.eligible:
                continue
            marks[cls], more = draft.take(log, listing.marks[cls], listing.bound)
            if more:
                break
        page = self._page(draft, is_list=True, is_final=not more)
        session.before = _Before(page, {cls: session.marks.get(cls, 0) for cls in marks}, listing)
        session.listing = _Listing(listing.bound, listing.marks | marks) if more else None
        for cls, mark in marks.items():
            session.marks[cls] = max(mark, session.marks.get(cls, 0))
        return page

    def _offer(self, name: str, session: _Session) -> Page | None:
        draft = _Draft(self._page_size, self._page_bytes)
        before: dict[JobClass, int] = {}
        for cls in list(session.todo):
            log = self._logs[cls]
            before[cls] = session.marks.get(cls, 0)
            session.marks[cls], more = draft.take(log, before[cls], self._seq)
            if more:
                break
            del session.todo[cls]
            log.waiting[name] = None
        if not draft.ids:
            return None
        page = self._page(draft, is_list=False, is_final=False)
        session.before = _Before(page, before, None)
        return page

    def _page(self, draft: _Draft, *, is_list: bool, is_final: bool) -> Page:
        fragments, last = self._last
        # 20 us for 1 000 candidates, where joining 2 MiB anew takes some ms.
        if (last.is_list, last.is_final) == (is_list, is_final) and fragments == draft.fragments:
            return structs.replace(last)
        fragments = draft.fragments
        frame = codec.job_list_chunk(fragments, is_final) if is_list else codec.job_offer(fragments)
        page = Page(frame, is_list, is_final, tuple(draft.ids))
        self._last = (fragments, page)
        return page

    # -- upkeep ----------------------------------------------------------------------------

    def _refresh(self, name: str, session: _Session) -> None:
        """The one place that decides who is in `_ready`."""
        if session.has_work:
            self._ready.setdefault(name)
        else:
            self._ready.pop(name, None)

    def _set_eligible(self, name: str, session: _Session) -> None:
        for cls, log in self._logs.items():
            now = eligible(cls, session.view)
            if now == (cls in session.eligible):
                continue
            if now:
                session.eligible[cls] = session.todo[cls] = None
            else:
                del session.eligible[cls]
                session.todo.pop(cls, None)
                log.waiting.pop(name, None)

    def _add_log(self, cls: JobClass) -> _Log:
        log = self._logs[cls] = _Log(cls)
        for name, session in self._sessions.items():
            if eligible(cls, session.view):
                session.eligible[cls] = None
                log.waiting[name] = None
        return log

    def _drop_log(self, cls: JobClass) -> None:
        """Forgets a class without candidates. If it comes back its numbers are higher ones."""
        del self._empty_logs[cls]
        del self._logs[cls]
        for name, session in self._sessions.items():
            session.eligible.pop(cls, None)
            session.todo.pop(cls, None)
            session.marks.pop(cls, None)
            self._refresh(name, session)

    def check(self) -> None:
        """Asserts the invariants of this core; slow."""
        for cls, log in self._logs.items():
            assert len(log.seqs) == len(log.ids) == len(log.fragments)
            assert log.seqs == sorted(set(log.seqs))
            assert not log.seqs or log.seqs[-1] <= self._seq
            assert log.live == sum(fragment is not None for fragment in log.fragments)
            assert (not log.live) == (cls in self._empty_logs)
        live = {
            log.ids[at]: (log, log.seqs[at])
            for log in self._logs.values()
            for at, fragment in enumerate(log.fragments)
            if fragment is not None
        }
        assert live == self._jobs
        assert len(self._empty_logs) <= _KEPT_LOGS
        assert self._ready.keys() == {n for n, s in self._sessions.items() if s.has_work}
        for name, session in self._sessions.items():
            assert session.eligible.keys() == {
                cls for cls in self._logs if eligible(cls, session.view)
            }
            assert session.marks.keys() <= self._logs.keys()
            for cls, log in self._logs.items():
                waits = name in log.waiting
                assert waits + (cls in session.todo) == (cls in session.eligible)
                unsent = log.fragments[bisect_right(log.seqs, session.marks.get(cls, 0)) :]
                assert not waits or not any(unsent)


class _Draft:
    """A page that is being filled."""

    def __init__(self, size: int, size_bytes: int) -> None:
        self._size = size
        self._room = size_bytes - _HEAD_BYTES
        self.ids: list[str] = []
        self.fragments: list[bytes] = []

    def take(self, log: _Log, mark: int, bound: int) -> tuple[int, bool]:
        """Adds what the log has with numbers above `mark` and up to `bound`. Returns the new
        mark, and whether a candidate was left for the next page."""
        for at in range(bisect_right(log.seqs, mark), len(log.seqs)):
            seq, fragment = log.seqs[at], log.fragments[at]
            if seq > bound:
                break
            if fragment is not None:
                fits = len(fragment) <= self._room and len(self.ids) < self._size
                if not fits and self.ids:  # a single candidate goes, however large
                    return mark, True
                self._room -= len(fragment)
                self.ids.append(log.ids[at])
                self.fragments.append(fragment)
            mark = seq
        return mark, False
