"""A server's cores with a real ledger and virtual time, driven step by step; no Trio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.ledger.errors import LedgerFailed, Refused
from actors.ledger.port import (
    AdmissionRefused,
    AdmissionTaken,
    Answer,
    Batch,
    Committed,
    Synced,
)
from actors.ledger.sqlite import SqliteLedger
from actors.server.authorization import Registration
from actors.server.config import ServerConfig
from actors.server.farm import Farm
from actors.server.ids import Ids
from actors.server.policies import load_policy
from actors.server.reaper import Reaper
from actors.server.sessions import SessionTable
from transport import messages as m
from transport.codec import Decoder, encode
from transport.interface import Incoming

BUILD = m.Capabilities(fetch=False, eval=False, build=True)
BOTH = m.Capabilities(fetch=False, eval=True, build=True)


def job(name: str, *needs: str, **more: Any) -> m.SubmittedJob:
    fields = {
        "drv_path": f"/nix/store/{name}.drv", "name": name, "system": "x86_64-linux",
        "required_features": [], "outputs": {"out": f"/nix/store/{name}"},
        "input_drvs": [f"/nix/store/{n}.drv" for n in needs], "input_srcs": [],
    }  # fmt: skip
    return m.SubmittedJob(**{**fields, **more})


class Harness:
    """One life of a server at a time; `restart` begins the next on the same ledger."""

    def __init__(self, folder: Path, registrations: dict[str, Registration] | None = None,
                 prefix: str = "server", **options: Any) -> None:  # fmt: skip
        self.prefix = prefix
        self.folder, self.registrations = folder, registrations
        self.config = ServerConfig(state_dir=folder, policy="simple", **options)
        self.now = 1_000.0
        self.wall_offset = 0.0
        self.life = 0
        self.ledger: SqliteLedger | None = None
        self.ids: dict[str, str] = {}
        self.fail_commits = 0
        self.auto_sync = True
        self.auto_admit = True
        self.others_alive: frozenset[str] = frozenset()
        self.defers = False
        self.deferred: list[Batch] = []
        self._decoder = Decoder(m.SERVER_MESSAGES)
        self.restart()

    @property
    def name(self) -> str:
        """The server's id in this life."""
        return f"{self.prefix}-{self.life}"

    def restart(self) -> None:
        if self.ledger is not None:
            self.ledger.close()
        self.life += 1
        self.ledger = SqliteLedger.open(
            self.folder / "ledger.sqlite3", self.name, wall=lambda: self.now + self.wall_offset
        )
        self.ledger.recover([f"{self.prefix}-{n}" for n in range(self.life)])
        self.sessions = SessionTable()
        self.reaper = Reaper(self.config.heartbeat_timeout, self.now)
        self.source = Ids(f"{self.life}" if self.prefix == "server" else self.name)
        self.gone: set[bytes] = set()
        self.answers: dict[bytes, list[m.Message]] = {}
        self.written = 0
        self.start_dispatch()

    def start_dispatch(self, *, has_forgotten: bool = False) -> None:
        self.farm = Farm(
            self.config, self.name, self.source, load_policy("simple"),
            self.sessions, self.registrations, self.ledger.load(self.wall_offset), self.now,
            first_batch=self.written + 1, others_alive=self.others_alive,
            has_forgotten=has_forgotten,
        )  # fmt: skip
        self._settle()

    # -- what happens ------------------------------------------------------------------------

    def send(self, peer: str, *messages: m.Message) -> list[m.Message]:
        """Frames of one message from a peer; returns what it is answered."""
        return self.send_raw(peer, *map(encode, messages))

    def send_raw(self, peer: str, *frames: bytes) -> list[m.Message]:
        before = len(self.answers.get(peer.encode(), []))
        self.farm.receive(Incoming(peer.encode(), list(frames), None), self.now)
        self._settle()
        return self.answers.get(peer.encode(), [])[before:]

    def receive(self, peer: str, *messages: m.Message) -> None:
        """Frames that come in before anything is settled."""
        self.farm.receive(Incoming(peer.encode(), list(map(encode, messages)), None), self.now)

    def settle(self) -> None:
        self._settle()

    def commit_deferred(self) -> None:
        """What the lock was not had for goes in after all."""
        self.defers = False
        batches, self.deferred = self.deferred, []
        for batch in batches:
            results = self.ledger.apply(batch.writes, 0.0, 1.0)
            self.farm.take(Committed(batch.number, results), self.now)
        self._settle()

    def wait(self, secs: float, *, step: float = 0.5) -> None:
        """Lets time pass, with the reaper's sweeps; everybody's `Ping` stays unanswered."""
        end = self.now + secs
        while self.now < end:
            self.now = min(end, self.now + step)
            self.farm.expire(self.now)
            for accusation in self.reaper.sweep(self.sessions, [], self.now):
                self.farm.take(accusation, self.now)
            self._settle()

    def lose(self, peer: str) -> None:
        """The connection is gone, and a send finds out."""
        self.gone.add(peer.encode())
        self.farm.peer_gone(peer.encode(), self.now)
        self._settle()

    def take(self, event: Any) -> None:
        self.farm.take(event, self.now)
        self._settle()

    # -- shorthands --------------------------------------------------------------------------

    def submit(self, *jobs: m.SubmittedJob, peer: str = "client", **more: Any) -> m.Message:
        message = m.CmdSubmit(request=1, is_final=True, jobs=list(jobs), **more)
        answer = self.send(peer, m.CmdHello(versions=(1, 1)), message)[-1]
        if isinstance(answer, m.CmdSubmitted):
            self.ids.update({p.removeprefix("/nix/store/").removesuffix(".drv"): j
                             for p, j in answer.jobs.items()})  # fmt: skip
        return answer

    def worker(self, name: str, *, slots: int = 1, systems: tuple[str, ...] = ("x86_64-linux",),
               features: tuple[str, ...] = (), can: m.Capabilities = BUILD, peer: str = "",
               running: tuple[m.ClaimRef, ...] = ()) -> list[m.Message]:  # fmt: skip
        """Opens a session and announces capabilities; returns the answers."""
        init = m.InitConnection(
            versions=(1, 1), id=name, capabilities=can, running=list(running) or None
        )
        told = m.WorkerCapabilities(
            architectures=list(systems), system_features=list(features),
            max_concurrent_builds=slots,
        )  # fmt: skip
        answers = self.send(peer or name, init)
        if any(isinstance(a, m.InitAck) for a in answers):
            answers += self.send(peer or name, told, m.RequestJobList())
        return answers

    def score_all(self, peer: str) -> None:
        scores = [
            m.Score(job_id=e.job_id, missing_count=0, missing_nar_size=0, outputs_present=False)
            for e in self.farm.assigner.pool
        ]
        if scores:
            self.send(peer, m.RequestJobChunk(scores=scores))

    def request(self, peer: str, kind: m.Kind = "build", *, accept: bool = True):
        """Scores everything, asks, and accepts; the `AssignJob` or none."""
        self.score_all(peer)
        given = [a for a in self.send(peer, m.RequestJob(kind=kind)) if isinstance(a, m.AssignJob)]
        assert len(given) <= 1
        if given and accept:
            self.answer(peer, given[0], accepted=True)
        return given[0] if given else None

    def answer(self, peer: str, given: m.AssignJob, *, accepted: bool) -> list[m.Message]:
        return self.send(peer, m.AssignJobResponse(
            job_id=given.job_id, assignment_id=given.assignment_id, accepted=accepted))  # fmt: skip

    def complete(self, peer: str, given: m.AssignJob) -> list[m.Message]:
        return self.send(peer, m.JobCompleted(
            job_id=given.job_id, assignment_id=given.assignment_id))  # fmt: skip

    def fail(self, peer: str, given: m.AssignJob, kind: m.FailureKind) -> list[m.Message]:
        return self.send(peer, m.JobFailed(
            job_id=given.job_id, assignment_id=given.assignment_id, error="why", kind=kind,
        ))  # fmt: skip

    def status(self, name: str) -> str:
        """The job's status in the ledger."""
        return self.ledger.job(self.ids[name], 0.0).status

    def outcomes(self, name: str) -> list[str | None]:
        return [claim.outcome for claim in self.ledger.claims_of(self.ids[name], 0.0)]

    # -- a turn --------------------------------------------------------------------------------

    def _settle(self) -> None:
        farm = self.farm
        for _ in range(100):
            while farm.admissions.merging:
                farm.expire(self.now)
            batch = farm.handout.next_batch(self.now)
            if batch is not None:
                self.written = batch.number
                if self.defers:
                    self.deferred.append(batch)
                elif self.fail_commits:
                    self.fail_commits -= 1
                    farm.handout.commit_failed(batch.number, self.now)
                else:
                    results = self.ledger.apply(batch.writes, self.wall_offset, 1.0)
                    farm.handout.committed(batch.number, results, self.now)
            elif farm.out.frames:
                self._deliver()
            elif farm.out.admissions and self.auto_admit:
                self._admit()
            elif farm.out.queries:
                queries, farm.out.queries = farm.out.queries, []
                for query in queries:
                    result = getattr(self.ledger, query.method)(*query.arguments)
                    farm.take(Answer(query.token, result), self.now)
            elif farm.handout.wants_sync and self.auto_sync and not farm._settlement._writes:
                farm.take(Synced(self.written), self.now)
            else:
                break
        else:
            raise LedgerFailed("the harness does not come to rest")
        farm.check()

    def _deliver(self) -> None:
        out, self.farm.out.frames = self.farm.out.frames, []
        for peer, frame, claim in out:
            if peer in self.gone:
                if claim is not None:
                    self.farm.handout.undeliverable(claim, self.now)
                self.farm.peer_gone(peer, self.now)
            else:
                self.answers.setdefault(peer, []).append(self._decoder.decode(frame))

    def _admit(self) -> None:
        requests, self.farm.out.admissions = self.farm.out.admissions, []
        for request in requests:
            try:
                admission = request.draft()
                admitted = self.ledger.admit(admission, self.wall_offset)
            except Refused as error:
                event: Any = AdmissionRefused(
                    request.token, request.requester, request.sender, str(error), True
                )
            else:
                event = AdmissionTaken(request.token, request.sender, admission, admitted)
            self.farm.take(event, self.now)
