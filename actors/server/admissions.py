"""The way of new jobs into the graph: collected, drafted, made durable, merged.

A submission arrives in parts and is taken whole or not at all. Checking and writing it happens on
the ledger's thread; the graph takes it in chunk by chunk, one per pass, so that a large one never
holds up a request. The sender is answered when all is durable and merged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from actors.graph.clusters import Place, Resolved, resolve
from actors.graph.order import BadGraph
from actors.ledger.errors import Refused
from actors.ledger.port import AdmissionRefused, AdmissionRequest, AdmissionTaken, Sender
from actors.ledger.records import AddMessages, Admission, ClusterRecord, JobRecord, MemberRecord
from actors.server.clusters.placement import load_solver
from actors.server.effects import Admit, ClustersAdded, Effect, Record, Tell
from actors.server.feeder import Feeder
from actors.server.ids import Ids
from actors.server.jobs import build_record, evaluation_record
from transport import messages as m

MERGE_CHUNK = 250
"""Jobs taken into the graph per pass: some 5 ms."""
ANSWER_CHUNK = 10_000
"""Jobs named per frame of an answer, some 1.5 MB; one a pass."""
MAX_JOBS = 1_000_000
"""Of one submission, and of all together that are still being sent."""
MAX_OPEN_SUBMISSIONS = 64
MAX_REFUSED = 10_000
"""Submissions refused before their final part, whose other parts are dropped."""
EXIT_BAD_INPUT, EXIT_FAILED = 2, 1


@dataclass(slots=True)
class _Submission:
    jobs: list[m.SubmittedJob] = field(default_factory=list)
    evaluations: list[m.SubmittedEvaluation] = field(default_factory=list)
    clusters: list[m.SubmittedCluster] = field(default_factory=list)

    def __len__(self) -> int:
        members = sum(len(cluster.members) for cluster in self.clusters)
        return len(self.jobs) + len(self.evaluations) + members


@dataclass(slots=True)
class _Merge:
    taken: AdmissionTaken
    position: int = 0
    answers: Iterator[Effect] | None = None
    """Once all is taken in: the parts of the answer that are left."""


class Admissions:
    """See above. `merging` tells the shell that the next pass should come soon."""

    def __init__(self, feeder: Feeder, ids: Ids) -> None:
        self._feeder = feeder
        self._ids = ids
        self._parts: dict[tuple[bytes, int], _Submission] = {}
        self._refused: dict[tuple[bytes, int], None] = {}
        self._sent: set[str] = set()
        self._merges: deque[_Merge] = deque()

    @property
    def merging(self) -> bool:
        return bool(self._merges)

    # -- in --------------------------------------------------------------------------------

    def submitted(self, peer: bytes, part: m.CmdSubmit, now: float) -> list[Effect]:
        """One part of a submission; the final one sends it to the ledger."""
        key = (peer, part.request)
        sender = Sender(peer, part.request)
        if key in self._refused:
            if part.is_final:
                del self._refused[key]
            return []
        effects: list[Effect] = []
        busy = "the server is taking too many submissions at once: try again"
        if key not in self._parts and len(self._parts) >= MAX_OPEN_SUBMISSIONS:
            effects.append(self._refuse(next(iter(self._parts)), EXIT_FAILED, busy))
        submission = self._parts.setdefault(key, _Submission())
        submission.jobs += part.jobs
        submission.evaluations += part.evaluations
        submission.clusters += part.clusters
        if len(submission) > MAX_JOBS:
            text = f"a submission has at most {MAX_JOBS} jobs: split the file"
            effects.append(self._refuse(key, EXIT_BAD_INPUT, text))
        elif sum(map(len, self._parts.values())) > MAX_JOBS:
            effects.append(self._refuse(key, EXIT_FAILED, busy))
        if not part.is_final:
            return effects
        if key in self._refused:
            del self._refused[key]
            return effects
        del self._parts[key]
        requester = self._ids.new("s")
        job_ids, interactive = self._ids.many("j"), part.interactive
        cluster_ids = self._ids.many("k")
        assume_built = part.assume_inputs_built

        def draft() -> Admission:
            return draft_submission(
                submission.jobs, submission.evaluations, requester, job_ids, now,
                interactive=interactive, assume_inputs_built=assume_built,
                clusters=submission.clusters, cluster_ids=cluster_ids,
            )  # fmt: skip

        return [*effects, self._send(requester, draft, sender)]

    def _refuse(self, key: tuple[bytes, int], code: int, text: str) -> Tell:
        """Whole or not at all: what comes of it after this is dropped, up to the final part."""
        del self._parts[key]
        self._refused[key] = None
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        peer, request = key
        return Tell(peer, m.CmdError(request=request, code=code, message=text))

    def abandoned(self, peer: bytes) -> None:
        """The sender of parts is gone before the final one."""
        for key in [key for key in (*self._parts, *self._refused) if key[0] == peer]:
            self._parts.pop(key, None)
            self._refused.pop(key, None)

    def evaluated(
        self, job_id: str, project: str, derivations: Sequence[m.Derivation], now: float
    ) -> list[Effect]:
        """A batch of an evaluation; inputs that it does not know yet may come in a later one."""
        evaluation = self._feeder.nodes[job_id]
        prioritized, interactive = evaluation.prioritized, evaluation.interactive
        job_ids = self._ids.many("j")

        def draft() -> Admission:
            jobs = [
                m.SubmittedJob(
                    **msgspec.structs.asdict(d), project=project, prioritized=prioritized or None
                )
                for d in {d.drv_path: d for d in derivations}.values()
            ]
            return msgspec.structs.replace(
                draft_submission(jobs, (), job_id, job_ids, now, interactive=interactive),
                unknown_inputs="later",
            )

        return [self._send(job_id, draft, None)]

    def _send(self, requester: str, draft: Callable[[], Admission], sender: Sender | None) -> Admit:
        token = self._ids.new("t")
        self._sent.add(token)
        self._feeder.admission_sent(requester)
        return Admit(AdmissionRequest(token, requester, sender, draft))

    # -- back from the ledger ----------------------------------------------------------------

    def refused(self, event: AdmissionRefused, now: float) -> list[Effect]:
        """The ledger took nothing of it."""
        effects: list[Effect] = []
        if event.sender is not None:
            code = EXIT_BAD_INPUT if event.is_bad_input else EXIT_FAILED
            refusal = m.CmdError(request=event.sender.request, code=code, message=event.message)
            effects.append(Tell(event.sender.peer, refusal))
        if event.token not in self._sent:
            return effects  # sent by a dispatch that was restarted since
        self._sent.remove(event.token)
        if event.sender is None and event.requester in self._feeder.nodes:
            effects.append(Record(AddMessages(event.requester, (), (event.message,))))
            self._feeder.evaluation_broken(event.requester, event.message)
        return [*effects, *self._feeder.admission_ended(event.requester, now)]

    def taken(self, event: AdmissionTaken, now: float) -> list[Effect]:
        """It is durable; its jobs are merged from now on."""
        if event.token not in self._sent:
            # Sent by a dispatch that was restarted since: this one loaded the jobs at its start.
            return list(_answers(event))
        self._sent.remove(event.token)
        self._merges.append(_Merge(event))
        self._feeder.sizes_known(event.admission.sizes)
        added = ClustersAdded(event.admitted.clusters)
        return [added, *self._feeder.merge_requeued(event.admitted, now)]

    def merge(self, now: float) -> tuple[list[Effect], str | None]:
        """Takes the next chunk into the graph; also returns the requester when it was the
        last of an admission."""
        merge = self._merges[0]
        taken = merge.taken
        jobs = taken.admission.jobs
        requester = taken.admission.requester
        effects: list[Effect] = []
        if merge.position <= len(jobs):
            end = merge.position + MERGE_CHUNK
            chunk = jobs[merge.position : end]
            effects = self._feeder.merge(chunk, requester, taken.admitted, now)
            merge.position = end
            if end < len(jobs):
                return effects, None
            merge.position = len(jobs) + 1
            effects += self._feeder.admission_ended(requester, now)
            merge.answers = _answers(taken)
        answer = next(merge.answers or iter(()), None)
        if answer is not None:
            effects.append(answer)
            if len(jobs) > ANSWER_CHUNK:
                return effects, None
        self._merges.popleft()
        return effects, requester


def draft_submission(
    jobs: Sequence[m.SubmittedJob],
    evaluations: Sequence[m.SubmittedEvaluation],
    requester: str,
    job_ids: Iterator[str],
    now: float,
    *,
    interactive: bool = False,
    assume_inputs_built: bool = False,
    clusters: Sequence[m.SubmittedCluster] = (),
    cluster_ids: Iterator[str] | None = None,
) -> Admission:
    """Checks and orders what was submitted; raises `Refused` with one line."""
    try:
        resolved = resolve(jobs, evaluations, clusters)
    except BadGraph as error:
        raise Refused(str(error)) from None
    if clusters:
        load_solver()  # here, where no request waits for it
    names = [c.cluster_id or next(cluster_ids or iter(())) for c in clusters]
    places = [place for _, members in resolved.clusters for place in members]
    owners = [name for name, (_, members) in zip(names, resolved.clusters, strict=True)
              for _ in members]  # fmt: skip
    of_build = {p.drv_path: owner for p, owner in zip(places, owners, strict=True) if p.drv_path}
    of_evaluation = {p.evaluation: owner for p, owner in zip(places, owners, strict=True)}
    builds = [
        build_record(
            job, job.job_id or next(job_ids), interactive=interactive,
            cluster=of_build.get(job.drv_path),
        )
        for job in resolved.jobs
    ]  # fmt: skip
    others = [
        evaluation_record(
            e, e.job_id or next(job_ids), now, interactive=interactive,
            cluster=of_evaluation.get(position),
        )
        for position, e in enumerate(resolved.evaluations)
    ]  # fmt: skip
    sizes = {
        p.path: p.nar_size
        for job in resolved.jobs
        for p in job.required_paths or ()
        if p.nar_size is not None
    }
    return Admission(
        requester=requester,
        jobs=(*builds, *others),
        clusters=_cluster_records(resolved, names, builds, others, now),
        sizes=tuple(sizes.items()),
        unknown_inputs="built" if assume_inputs_built else "refuse",
    )


def _cluster_records(
    resolved: Resolved,
    names: Sequence[str],
    builds: Sequence[JobRecord],
    evaluations: Sequence[JobRecord],
    now: float,
) -> tuple[ClusterRecord, ...]:
    by_path = {record.drv_path: record for record in builds}

    def job_of(place: Place) -> JobRecord:
        return (
            by_path[place.drv_path] if place.evaluation is None else evaluations[place.evaluation]
        )

    return tuple(
        ClusterRecord(
            cluster_id=name,
            project=job_of(places[0]).project,
            status="Queued",
            members=tuple(
                MemberRecord(job_of(p).job_id, p.role, p.index, p.primary, p.pin) for p in places
            ),
            same_zone=bool(cluster.same_zone),
            retry_budget=cluster.retry_budget or 0,
            prioritized=bool(cluster.prioritized),
            created_at=now,
        )
        for name, (cluster, places) in zip(names, resolved.clusters, strict=True)
    )


def _answers(taken: AdmissionTaken) -> Iterator[Effect]:
    """The answer to a submission, in as many parts as it takes, each made when it is asked for."""
    if taken.sender is None:
        return
    known = taken.admitted.known
    records = taken.admission.jobs
    for start in range(0, max(len(records), 1), ANSWER_CHUNK):
        is_final = start + ANSWER_CHUNK >= len(records)
        answer = m.CmdSubmitted(
            request=taken.sender.request,
            is_final=is_final,
            submission=taken.admission.requester,
            jobs={
                r.drv_path: known[r.drv_path].job_id if r.drv_path in known else r.job_id
                for r in records[start : start + ANSWER_CHUNK]
                if r.drv_path is not None
            },
            evaluations=[r.job_id for r in records if r.kind == "eval"] if is_final else [],
            clusters=[c.cluster_id for c in taken.admitted.clusters] if is_final else [],
        )
        yield Tell(taken.sender.peer, answer)
