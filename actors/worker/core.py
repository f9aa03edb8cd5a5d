"""The worker's side of the protocol, as a machine without a clock, a socket or a process.

Theory of operation. `step(event, now)` first lets everything happen that is due by `now`, then
takes the event, and returns what is to be done, in order. `deadline` says when to come back
with a `Tick` if nothing else happens. What a server may send at any moment is answered or
ignored; it never makes the core raise.

A connection goes idle -> handshake -> serving and back to idle; jobs live beside it and
outlive it. What belongs to a session (the first list, pages being scored, the server's
`Draining`) starts anew with each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from actors.worker import events as e
from actors.worker import policy
from actors.worker.events import Assignment
from actors.worker.executors.base import Failed, Outcome, score_as_missing
from actors.worker.tasks import SILENTLY, JobTable, Stop, Task
from transport import messages as m

MAX_UNSCORED_PAGES = 256
MAX_UNSENT_SIGNALS = 64  # of one member, while there is no session
MAX_UNCONFIRMED = 256  # reports; a server so far behind gets no more work from us
_STORY_LENGTH = 100
# Of an `InitConnection` without what it still runs, and of the keys of one claim in it.
_HELLO_BYTES = 4_096
_CLAIM_BYTES = 32
_KINDS: tuple[m.Kind, ...] = ("build", "eval")
_REFUSALS = {
    401: "check the tokens in the peers file",
    403: "have the worker's id registered at the server",
    496: "another worker uses this id; give each worker its own --state-dir or --id",
}


class CoreSettings(Struct, frozen=True):
    """Who this worker is and what it announces."""

    worker_id: str
    capabilities: m.Capabilities
    announced: m.WorkerCapabilities
    max_builds: int
    max_evals: int
    name: str | None = None
    agent: str | None = None
    tokens: dict[str, str] = {}
    """By peer; `*` answers for all others."""


class Link(Enum):
    IDLE = "idle"
    HANDSHAKE = "handshake"
    SERVING = "serving"
    ENDED = "ended"


class WorkerCore:
    """One worker. `jitter` returns numbers from 0 to 1."""

    def __init__(self, settings: CoreSettings, jitter: Callable[[], float], now: float) -> None:
        self._settings = settings
        self._jitter = jitter
        self._tokens = settings.tokens
        self._announced = settings.announced
        self._metrics: m.WorkerMetrics | None = None
        self._trouble: str | None = None
        self.jobs = JobTable({"build": settings.max_builds, "eval": settings.max_evals})
        self.story: deque[str] = deque(maxlen=_STORY_LENGTH)
        self._out: list[e.Effect] = []

        self.link = Link.IDLE
        self._connection = 0
        self._tried_at = now
        self._retry_at = now
        self._unserved_since = now
        self._late_tries = 0
        self._refusals = 0
        self._complaint = ""
        self._session_lost_at: float | None = None
        self._outage_limit = policy.DEFAULT_OUTAGE_LIMIT

        self._kinds: tuple[m.Kind, ...] = ()
        self._listed = False
        self._served = False
        self._server_draining = False
        self._pages: dict[int, bool] = {}
        """Pages being scored; whether it ends the list."""
        self._page = 0
        self._offers: set[int] = set()
        self._idle_at = inf
        self._heard_at = now
        self._pinged_at: float | None = None
        self._nonce = 0

        self.draining = False
        self._drain_at = inf
        self._confirm_at = inf
        self._exit_code = 0

    # -- time ----------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """When the next `Tick` is due, on the clock of `step`'s `now`."""
        times = [t.hold_until for t in self.jobs.tasks.values() if t.hold_until is not None]
        match self.link:
            case Link.IDLE if not self.draining:
                times.append(self._retry_at)
            case Link.HANDSHAKE:
                times.append(self._tried_at + policy.HANDSHAKE_LIMIT)
            case Link.SERVING:
                times += [self._idle_at, self._silence_due()]
            case Link.ENDED:
                return inf
        if self._session_lost_at is not None:
            times.append(self._session_lost_at + self._outage_limit)
        if self.draining:
            times += [self._drain_at + policy.DRAIN_LIMIT, self._confirm_at]
        return min(times, default=inf)

    def _silence_due(self) -> float:
        if self._pinged_at is None:
            return self._heard_at + policy.PING_AFTER
        wait = policy.LOST_AFTER - policy.PING_AFTER
        return max(self._heard_at + policy.LOST_AFTER, self._pinged_at + wait)

    def _let_time_pass(self, now: float) -> None:
        for task in self.jobs.held():
            if task.hold_until is not None and task.hold_until <= now:
                self._report(task, Failed("Aborted", "cluster start timed out"))
                self._request(task.assignment.kind)
        lost_at = self._session_lost_at
        if lost_at is not None and lost_at + self._outage_limit <= now:
            self._session_lost_at = None
            self._give_up_jobs()
        if self.link is Link.IDLE and not self.draining and self._retry_at <= now:
            self._connect(now)
        elif self.link is Link.HANDSHAKE and self._tried_at + policy.HANDSHAKE_LIMIT <= now:
            self._lose("the server did not complete the handshake within 5 s", now)
        elif self.link is Link.SERVING:
            self._watch_silence(now)
        if self.link is Link.SERVING and self._idle_at <= now:
            self._idle_at += policy.REQUEST_EVERY
            if self._idle_at <= now:  # missed rounds merge into one
                self._idle_at = now + policy.REQUEST_EVERY
            self._request_all()
        if self.draining:
            self._leave_if_done(now)

    def _watch_silence(self, now: float) -> None:
        due = self._silence_due()
        if now < due:
            return
        # Called so late, it was this process that stood still: ask (again) before judging.
        if self._pinged_at is None or now - due > 1:
            self._pinged_at = now
            self._nonce += 1
            self._send(m.Ping(nonce=self._nonce))
        else:
            self._lose("the server sent nothing for 10 s and answered no ping", now)

    # -- events --------------------------------------------------------------------------

    def step(self, event: e.Event, now: float) -> list[e.Effect]:
        """Takes one event at monotonic time `now`; returns what to do, in order."""
        self._out = []
        if self.has_ended:
            return self._out
        if not isinstance(event, e.Tick):
            self.story.append(f"{now:.3f} {_brief(event)}")
        self._let_time_pass(now)
        if self.has_ended:
            return self._out
        match event:
            case e.Received() | e.Garbled() | e.Lost() | e.Scored():
                if event.connection == self._connection and self.link is not Link.IDLE:
                    self._take_from_link(event, now)
            case (
                e.JobUpdated() | e.BuildAdvanced() | e.EvalAdvanced() | e.JobAsked()
                | e.SignalSent() | e.JobLogged()
            ):  # fmt: skip
                task = self.jobs.tasks.get(event.assignment_id)
                if task is not None and task.stop is None:
                    self._take_from_job(task, event, now)
            case e.JobFinished():
                self._finish(event)
            case e.MetricsReady():
                self._metrics = replace(event.metrics, trouble=self._trouble)
                self._send_if_serving(self._metrics)
            case e.DisksChecked():
                self._check_disks(event.trouble)
            case e.CapabilitiesChanged():
                self._announced = event.capabilities
                self._send_if_serving(event.capabilities)
            case e.PeersChanged():
                self._tokens = event.tokens
                self._send_if_serving(m.ReauthRequest())
            case e.DrainRequested():
                self._drain(event, now)
            case e.Tick():
                pass
        if self.draining:
            self._leave_if_done(now)
        return self._out

    @property
    def has_ended(self) -> bool:
        """It has exited, and ignores whatever still comes."""
        return self.link is Link.ENDED

    def check(self) -> None:
        """Asserts what always holds between two steps."""
        self.jobs.check()
        if self.link is not Link.SERVING:
            assert not self._pages
            assert not self.jobs.held()
        if self.draining:
            assert not self.jobs.held()
            assert all(task.stop for task in self.jobs.running())

    def _take_from_link(
        self, event: e.Received | e.Garbled | e.Lost | e.Scored, now: float
    ) -> None:
        match event:
            case e.Lost(_, reason):
                self._lose(reason, now)
            case e.Scored():
                self._answer_page(event, now)
            case e.Garbled(_, reason):
                self._heard(now)
                self._note("warning", f"ignored a malformed frame of the server: {reason}")
            case e.Received(_, message):
                self._heard(now)
                if isinstance(message, m.Ping):
                    self._send(m.Pong(nonce=message.nonce))
                elif isinstance(message, m.Reject):
                    self._refused(message, now)
                elif isinstance(message, m.AuthChallenge):
                    self._answer_challenge(message)
                elif self.link is Link.SERVING:
                    self._take(message, now)
                elif isinstance(message, m.InitAck):
                    self._open(message, now)

    def _take(self, message: m.Message, now: float) -> None:
        match message:
            case m.AssignJob():
                self._assigned(message, now)
            case m.JobOffer():
                self._score(message.candidates, ends_list=False, is_offer=True, now=now)
            case m.JobListChunk():
                self._score_list_page(message, now)
            case m.Recorded():
                self.jobs.reports.pop(message.assignment_id, None)
            case m.AbortJob():
                self._abort(message)
            case m.StartCluster():
                self._start_cluster(message)
            case m.AbortCluster():
                self._abort_cluster(message)
            case m.ClusterSignal(attempt, payload, _, m.MemberRef() as sender):
                task = self.jobs.of_attempt(attempt)
                if task is not None and not task.is_held and task.stop is None:
                    claim = task.assignment
                    self._do(e.DeliverSignal(claim.assignment_id, sender, payload))
            case m.KnownDerivations():
                self._do(e.JobAnswered(message.query_id, message.known))
            case m.Draining():
                self._server_draining = True
                self._note("info", "the server is stopping; jobs go on, no more are asked for")
            case m.AuthUpdate():
                self._note_peers(message.failed_peers)
            case m.Error():
                self._note("warning", f"the server says: {message.message} ({message.code})")
            case _:
                pass

    # -- the connection ------------------------------------------------------------------

    def _connect(self, now: float) -> None:
        self._connection += 1
        self.link = Link.HANDSHAKE
        self._tried_at = now
        self._do(e.Connect(self._connection))
        self._send(
            m.InitConnection(
                versions=m.PROTOCOL_VERSIONS,
                id=self._settings.worker_id,
                capabilities=self._settings.capabilities,
                name=self._settings.name,
                agent=self._settings.agent,
                running=_fitting(self.jobs.claims()) or None,
            )
        )

    def _answer_challenge(self, challenge: m.AuthChallenge) -> None:
        wildcard = self._tokens.get("*")
        tokens = {peer: self._tokens.get(peer, wildcard) for peer in challenge.peers}
        self._send(m.AuthResponse(tokens={p: t for p, t in tokens.items() if t is not None}))

    def _open(self, ack: m.InitAck, now: float) -> None:
        self.link = Link.SERVING
        self._session_lost_at = None
        self._outage_limit = policy.outage_limit(ack.heartbeat_timeout)
        self._kinds = tuple(kind for kind in _KINDS if getattr(ack.capabilities, kind))
        self._heard(now)
        self._note("info", f"connected, session {ack.session}")
        self._note_peers(ack.failed_peers)
        self._send(self._announced)
        self._send(m.RequestJobList())
        if self._metrics is not None:
            self._send(self._metrics)
        self._resume(frozenset(ack.resumed))

    def _resume(self, resumed: frozenset[str]) -> None:
        for task in self.jobs.running():
            claim = task.assignment
            if claim.assignment_id not in resumed:
                self._stop(task, SILENTLY)
                continue
            for message in task.replay:
                self._send(message)
            if task.unsent_log_bytes:
                gap = f"[{task.unsent_log_bytes} bytes of log lost without a server]\n"
                self._send(m.LogChunk(claim.job_id, claim.assignment_id, gap.encode()))
                task.unsent_log_bytes = 0
            self._send_signals(task.unsent_signals)
            task.drops_signals = False
        for report in list(self.jobs.reports.values()):
            if report.assignment_id not in resumed:
                del self.jobs.reports[report.assignment_id]
                continue
            self._send_signals(report.unsent_signals)
            for message in report.messages:
                self._send(message)

    def _send_signals(self, unsent: list[m.ClusterSignal]) -> None:
        for signal in unsent:
            self._send(signal)
        unsent.clear()

    def _refused(self, reject: m.Reject, now: float) -> None:
        # What a server says that is about to stop needs nobody to do anything.
        hint = None if "not accepting" in reject.reason else _REFUSALS.get(reject.code)
        text = f"the server refused this worker: {reject.reason} ({reject.code})"
        self._note("error", f"{text}; {hint}" if hint else text)
        self._refusals += 1
        self._close(now)

    def _lose(self, reason: str, now: float) -> None:
        if self.link is Link.SERVING:
            self._note("warning", f"lost the server: {reason}")
        else:
            # Once, not every second.
            self._note("debug" if reason == self._complaint else "warning", f"no server: {reason}")
            self._complaint = reason
        self._close(now)

    def _close(self, now: float) -> None:
        if self._served:
            self._unserved_since = now
        elif now - self._unserved_since > policy.CLOSE_TRIES_FOR:
            self._late_tries += 1
        delay = policy.retry_delay(
            now - self._unserved_since, self._late_tries, self._refusals, self._jitter()
        )
        self._retry_at = now + delay if self._refusals or self._served else self._tried_at + delay
        # A try that hung for 5 s is not followed at once by the next.
        self._retry_at = max(self._retry_at, now + 0.1)
        if self.link is Link.SERVING:
            self._session_lost_at = now
        self._end_session()
        self.link = Link.IDLE
        for task in self.jobs.held():
            self.jobs.release(task)

    def _end_session(self) -> None:
        self._do(e.Disconnect())
        self._pages.clear()
        self._offers.clear()
        self._listed = self._served = self._server_draining = False
        self._idle_at = inf
        self._kinds = ()

    def _heard(self, now: float) -> None:
        self._heard_at = now
        self._pinged_at = None

    def _note_peers(self, failed: list[m.FailedPeer]) -> None:
        for peer in failed:
            self._note("warning", f"not authorized for {peer.peer}: {peer.reason}")

    def _give_up_jobs(self) -> None:
        for task in self.jobs.running():
            self._stop(task, SILENTLY)
        if self.jobs.tasks or self.jobs.reports:
            self._note("warning", "no server for too long: what runs is aborted")
        self.jobs.reports.clear()

    # -- offers and requests -------------------------------------------------------------

    def _score_list_page(self, chunk: m.JobListChunk, now: float) -> None:
        if not self._served:
            # From here on the next outage is a new one.
            self._served = True
            self._late_tries = self._refusals = 0
            self._complaint = ""
        self._score(chunk.candidates, ends_list=chunk.is_final, is_offer=False, now=now)

    def _score(
        self, candidates: list[m.JobCandidate], *, ends_list: bool, is_offer: bool, now: float
    ) -> None:
        self._page += 1
        self._pages[self._page] = ends_list
        if is_offer:
            self._offers.add(self._page)
        if len(self._pages) > MAX_UNSCORED_PAGES:
            # The store is stuck. Every candidate gets an answer all the same, the safe one.
            scores = score_as_missing(candidates)
            self._answer_page(e.Scored(self._connection, self._page, scores), now)
        elif candidates:
            self._do(e.ScorePage(self._connection, self._page, candidates))
        else:
            self._answer_page(e.Scored(self._connection, self._page, []), now)

    def _answer_page(self, scored: e.Scored, now: float) -> None:
        ends_list = self._pages.pop(scored.page, None)
        if ends_list is None:
            return
        is_offer = scored.page in self._offers
        self._offers.discard(scored.page)
        self._send(m.RequestJobChunk(scores=scored.scores, is_final=ends_list or is_offer))
        if ends_list:
            self._listed = True
            self._idle_at = now + policy.REQUEST_EVERY * self._jitter()
        if ends_list or is_offer:
            self._request_all()

    def _request_all(self) -> None:
        for kind in _KINDS:
            self._request(kind)

    def _check_disks(self, trouble: str | None) -> None:
        """On a full disk one build after the other would fail, and fast: none is asked for."""
        if trouble == self._trouble:
            return
        self._trouble = trouble
        self._metrics = replace(self._metrics or m.WorkerMetrics(), trouble=trouble)
        self._send_if_serving(self._metrics)
        if trouble is None:
            self._note("info", "there is room on the disk again; jobs are asked for")
            self._request_all()
        else:
            self._note("warning", f"{trouble}: no jobs are asked for until there is room")

    def _request(self, kind: m.Kind) -> None:
        """Asks for one job of `kind`, if there is a slot for it and the time is right."""
        if (
            self._listed
            and not self.draining
            and not self._server_draining
            and self._trouble is None
            and kind in self._kinds
            and self.jobs.free(kind) > 0
            and len(self.jobs.reports) < MAX_UNCONFIRMED
        ):
            self._send(m.RequestJob(kind=kind))

    # -- assignments ---------------------------------------------------------------------

    def _assigned(self, message: m.AssignJob, now: float) -> None:
        claim = Assignment(message.job_id, message.assignment_id, message.job, message.cluster)
        refusal = self._refusal(claim)
        self._send(
            m.AssignJobResponse(
                job_id=claim.job_id,
                assignment_id=claim.assignment_id,
                accepted=refusal is None,
                reason=refusal,
            )
        )
        if refusal is not None:
            return
        if claim.seat is not None:
            self.jobs.take(claim, now + claim.seat.hold_secs)
        else:
            self._start(self.jobs.take(claim, None))
        self._request(claim.kind)

    def _refusal(self, claim: Assignment) -> str | None:
        if self.draining:
            return "worker draining"
        if self._trouble is not None:
            return self._trouble
        if claim.seat is not None and self.jobs.of_attempt(claim.seat.attempt) is not None:
            return "already holds a member of this attempt"
        earlier = self.jobs.of_job(claim.job_id)
        if earlier is not None:
            # The server would not assign it anew if that claim were still open.
            if not earlier.is_held:
                self._stop(earlier, SILENTLY)
            return "an earlier run of this job is still being stopped"
        if claim.assignment_id in self.jobs.reports:
            return "this assignment has ended"
        if self.jobs.free(claim.kind) <= 0:
            return f"no free {claim.kind} slot"
        return None

    def _start(self, task: Task, roster: Sequence[m.RosterEntry] = ()) -> None:
        task.hold_until = None
        self._do(e.StartJob(task.assignment, list(roster)))
        if task.assignment.kind == "build":
            self._send(self._update(task, m.Building()))

    def _abort(self, message: m.AbortJob) -> None:
        task = self.jobs.tasks.get(message.assignment_id)
        if task is None:
            return
        if task.is_held:
            self._report(task, Failed("Aborted", message.reason))
            self._request(task.assignment.kind)
        else:
            self._stop(task, Stop("Aborted", message.reason))

    def _start_cluster(self, message: m.StartCluster) -> None:
        task = self.jobs.of_attempt(message.attempt)
        if task is not None and task.is_held:
            self._start(task, message.roster)

    def _abort_cluster(self, message: m.AbortCluster) -> None:
        task = self.jobs.of_attempt(message.attempt)
        if task is None:
            return
        if task.is_held:
            self.jobs.release(task)
            self._request(task.assignment.kind)
        else:
            self._stop(task, Stop("Aborted", message.reason))

    def _stop(self, task: Task, stop: Stop) -> None:
        """Ends a running job. The first reason stays, unless the claim is lost meanwhile."""
        if task.stop is None:
            self._do(e.StopJob(task.assignment.assignment_id))
            task.stop = stop
        elif stop.kind is None:
            task.stop = stop

    # -- what jobs say -------------------------------------------------------------------

    def _take_from_job(
        self,
        task: Task,
        event: e.JobUpdated
        | e.BuildAdvanced
        | e.EvalAdvanced
        | e.JobAsked
        | e.SignalSent
        | e.JobLogged,
        now: float,
    ) -> None:
        claim = task.assignment
        match event:
            case e.JobUpdated(_, update):
                message = self._update(task, update)
                if isinstance(update, m.EvalResult):
                    task.replay.append(message)
                self._send_if_serving(message)
            case e.BuildAdvanced(_, phase, bytes_done, bytes_total, paths_done, paths_total):
                self._send_if_serving(
                    m.BuildProgress(
                        claim.job_id, claim.assignment_id, phase, bytes_done, bytes_total,
                        paths_done, paths_total,
                    )
                )  # fmt: skip
            case e.EvalAdvanced(_, derivations):
                last = task.progress_at
                if last is None or now - last >= policy.EVAL_PROGRESS_EVERY:
                    task.progress_at = now
                    progress = m.EvalProgress(claim.job_id, claim.assignment_id, derivations)
                    self._send_if_serving(progress)
            case e.JobAsked(_, query_id, drv_paths):
                self._send_if_serving(
                    m.QueryKnownDerivations(claim.job_id, claim.assignment_id, query_id, drv_paths)
                )
            case e.SignalSent(_, to, payload):
                self._signal(task, to, payload)
            case e.JobLogged(_, data):
                if self.link is not Link.SERVING:
                    task.unsent_log_bytes += len(data)
                    return
                for at in range(0, len(data), m.MAX_LOG_CHUNK_BYTES):
                    chunk = data[at : at + m.MAX_LOG_CHUNK_BYTES]
                    self._send(m.LogChunk(claim.job_id, claim.assignment_id, chunk))

    def _signal(self, task: Task, to: m.MemberRef | None, payload: bytes) -> None:
        if task.assignment.seat is None:
            return
        signal = m.ClusterSignal(task.assignment.seat.attempt, payload, to)
        if self.link is Link.SERVING:
            self._send(signal)
        elif len(task.unsent_signals) < MAX_UNSENT_SIGNALS:
            task.unsent_signals.append(signal)
        elif not task.drops_signals:
            task.drops_signals = True
            text = f"signals of cluster member {task.assignment.job_id} are dropped"
            self._note("warning", f"{text}: {MAX_UNSENT_SIGNALS} wait for a server")

    def _finish(self, event: e.JobFinished) -> None:
        task = self.jobs.tasks.get(event.assignment_id)
        assert task is not None, "only jobs that were started finish"
        assert not task.is_held
        self._report(task, event.outcome)
        self._request(task.assignment.kind)

    def _report(self, task: Task, outcome: Outcome | None) -> None:
        for message in self.jobs.finish(task, outcome):
            self._send_if_serving(message)

    # -- the end -------------------------------------------------------------------------

    def _drain(self, event: e.DrainRequested, now: float) -> None:
        if self.draining:
            return
        self.draining = True
        self._drain_at = now
        self._exit_code = event.exit_code
        if self.link is Link.HANDSHAKE:
            self._end_session()
            self.link = Link.IDLE
        self._send_if_serving(m.Draining())
        for task in self.jobs.held():
            self._report(task, Failed("Aborted", "worker draining"))
        for task in self.jobs.running():
            self._stop(task, Stop("Canceled", "worker draining"))

    def _leave_if_done(self, now: float) -> None:
        if self.has_ended:
            return
        is_late = now >= self._drain_at + policy.DRAIN_LIMIT
        if self.jobs.tasks and not is_late:
            return
        if self.link is Link.SERVING:
            if self.jobs.reports and not is_late:
                # The reports are under way; what they say should be durable before we go.
                self._confirm_at = min(self._confirm_at, now + policy.CONFIRM_LIMIT)
                if now < self._confirm_at:
                    return
            self._send(m.Goodbye())
            self._end_session()
        self.link = Link.ENDED
        self._do(e.Exit(self._exit_code))

    # -- effects -------------------------------------------------------------------------

    def _update(self, task: Task, update: m.AnyUpdate) -> m.JobUpdate:
        return m.JobUpdate(task.assignment.job_id, task.assignment.assignment_id, update)

    def _do(self, effect: e.Effect) -> None:
        self._out.append(effect)

    def _send(self, message: m.Message) -> None:
        self._out.append(e.Send(message))

    def _send_if_serving(self, message: m.Message) -> None:
        if self.link is Link.SERVING:
            self._send(message)

    def _note(self, level: e.Level, text: str) -> None:
        self._out.append(e.Note(level, text))


def _fitting(claims: list[m.ClaimRef]) -> list[m.ClaimRef]:
    """As many claims as the first frame of a handshake can name; the others are given up."""
    room = m.MAX_HANDSHAKE_FRAME_BYTES - _HELLO_BYTES
    fitting = []
    for claim in claims:
        room -= len(claim.job_id.encode()) + len(claim.assignment_id.encode()) + _CLAIM_BYTES
        if room < 0:
            break
        fitting.append(claim)
    return fitting


def _brief(event: e.Event) -> str:
    match event:
        case e.Received(connection, message):
            return f"#{connection} {type(message).__name__}"
        case e.Lost(connection, reason):
            return f"#{connection} lost: {reason}"
        case e.JobFinished(assignment_id, outcome):
            return f"finished {assignment_id}: {type(outcome).__name__}"
        case _:
            return type(event).__name__
