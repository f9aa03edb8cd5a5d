"""Claims and commits: how a pick becomes a row of the ledger, and the row an `AssignJob`.

`AssignJob` can only come out of a commit that won.
"""

from __future__ import annotations

from actors.ledger.port import Batch
from actors.ledger.records import OpenClaim
from actors.server.admissions import Admissions
from actors.server.assigner import Assigner
from actors.server.claims import Claim, breakdown
from actors.server.clusters.coordinator import Coordinator
from actors.server.clusters.model import Opening, Starting
from actors.server.effects import Enter, Leave
from actors.server.feeder import Feeder
from actors.server.jobs import job_map
from actors.server.outgoing import Outgoing
from actors.server.reports import Reports
from actors.server.routes import Routes
from actors.server.sessions import Session, SessionTable
from actors.server.settlement import Settlement
from transport.codec import assign_job, encode_value


class Handout:
    """Of one server; the shell commits `next_batch` until there is none."""

    def __init__(
        self,
        server: str,
        sessions: SessionTable,
        settlement: Settlement,
        out: Outgoing,
        routes: Routes,
        *,
        assigner: Assigner,
        feeder: Feeder,
        coordinator: Coordinator,
        reports: Reports,
        admissions: Admissions,
    ) -> None:
        self._server = server
        self._sessions = sessions
        self._settlement = settlement
        self._out = out
        self._routes = routes
        self._assigner = assigner
        self._feeder = feeder
        self._coordinator = coordinator
        self._reports = reports
        self._admissions = admissions
        self.lost_races = 0

    def claim(self, claim: Claim) -> None:
        """What the assigner picked goes to the ledger; if it wins, to its worker."""
        self._feeder.claimed(claim.job_id)
        self._out.pager.append(Leave(claim.job_id))
        score = encode_value(breakdown(claim))
        self._settlement.claim(claim, OpenClaim(claim.record(self._server), score))

    def next_batch(self, now: float) -> Batch | None:
        """What is to be committed now, if anything; clusters are placed first."""
        while self._routes.ended:
            write = self._routes.ended.pop()
            self._routes.route(self._coordinator.member_ended(write.job_id, write.error, now), now)
        self._routes.route(self._coordinator.place(now), now)
        return self._settlement.next_batch(now)

    @property
    def wants_sync(self) -> bool:
        """Whether somebody waits for what was committed to become durable."""
        return self._settlement.wants_sync

    @property
    def has_unwritten(self) -> bool:
        """Whether what workers reported would be lost with these cores."""
        return self._settlement.has_unwritten or self._reports.holds_any

    @property
    def is_settled(self) -> bool:
        """Whether everything that was told is durable and no claim is unanswered."""
        return (
            self._settlement.is_settled
            and not self._admissions.merging
            and all(c.state == "accepted" for c in self._assigner.claims.values())
        )

    def committed(self, number: int, results: list[bool], now: float) -> None:
        """A batch is in: winners are told, losers move on to their next best."""
        for awaited, has_won in self._settlement.committed(number, results):
            match awaited:
                case Opening(attempt=attempt) if has_won:
                    self._routes.route(self._coordinator.opened(attempt, now), now)
                case Opening(attempt=attempt):
                    self.lost_races += 1
                    self._routes.route(self._coordinator.not_opened(attempt, now), now)
                case Starting(attempt=attempt):
                    self._routes.route(self._coordinator.started(attempt, now, won=has_won), now)
                case Claim() if has_won:
                    self._won(awaited, now)
                case Claim():
                    self.lost_races += 1
                    following = self._assigner.lost_race(awaited, now)
                    if following is not None:
                        self.claim(following)

    def commit_failed(self, number: int, now: float) -> None:
        """A batch was rolled back. Its claims are off; everything else is written again."""
        for awaited in self._settlement.failed(number, now):
            if isinstance(awaited, Claim):
                self._give_back(awaited, now)
            else:
                self._routes.route(self._coordinator.not_opened(awaited.attempt, now), now)

    def _won(self, claim: Claim, now: float) -> None:
        node = self._feeder.nodes[claim.job_id]
        self._assigner.won(claim, now)
        session = self._sessions.by_id.get(claim.session or "")
        if claim.abort_reason is not None:
            self._routes.route(self._reports.unconfirmed(claim, now), now)
        elif session is None or session.is_draining or not self._may_run(session, claim):
            self._routes.route(self._reports.undeliverable(claim, now), now)
        else:
            assert claim.entry is not None
            frame = assign_job(claim.job_id, claim.assignment_id, job_map(node, claim.entry))
            self._out.frames.append((session.peer, frame, claim))
            session.holds_claims = True

    def _may_run(self, session: Session, claim: Claim) -> bool:
        project = self._feeder.nodes[claim.job_id].cls.project
        return session.projects is None or project in session.projects

    def _give_back(self, claim: Claim, now: float) -> None:
        """The claim was never written: its job is a candidate as before."""
        self._assigner.release(claim)
        assert claim.entry is not None
        if claim.abort_reason is not None:
            self._routes.route(self._feeder.aborted(claim.job_id, now), now)
        else:
            self._feeder.unclaimed(claim.job_id)
            self._routes.route([Enter(claim.entry)], now)

    def undeliverable(self, claim: Claim, now: float) -> None:
        """The `AssignJob` found its peer gone."""
        if self._assigner.claims.get(claim.job_id) is claim:
            self._routes.route(self._reports.undeliverable(claim, now), now)
