"""Clusters that people submit: members in one form, and whether they can start at all. Pure.

A member names its job whole or by reference. `resolve` brings whole builds among the others and
leaves references, so that what follows knows one form only.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from actors.graph.knots import find_knot
from actors.graph.order import BadGraph, check, shown
from transport.messages import (
    SubmittedCluster,
    SubmittedEvaluation,
    SubmittedJob,
    SubmittedMember,
)

MAX_MEMBERS = 256
"""Of one cluster, each on a worker of its own."""


class Place(Struct, frozen=True):
    """A member with its job found."""

    role: str
    index: int
    primary: bool
    pin: str | None
    drv_path: str | None
    """Of a build."""
    evaluation: int | None
    """Of an evaluation: its position in `Resolved.evaluations`."""


class Resolved(Struct, frozen=True):
    """What a submission asks for, in one form."""

    jobs: tuple[SubmittedJob, ...]
    """Inputs before what needs them, those of members among them."""
    evaluations: tuple[SubmittedEvaluation, ...]
    clusters: tuple[tuple[SubmittedCluster, tuple[Place, ...]], ...]


def resolve(
    jobs: Sequence[SubmittedJob],
    evaluations: Sequence[SubmittedEvaluation],
    clusters: Sequence[SubmittedCluster],
) -> Resolved:
    """Finds the job of every member, and checks all.

    Raises:
        BadGraph: one line that names the entry and the field.
    """
    entries = [(f"jobs[{i}]", job) for i, job in enumerate(jobs)]
    all_evaluations = [(f"evaluations[{i}]", e) for i, e in enumerate(evaluations)]
    for where, member in _members(clusters):
        if (member.job is None) == (member.evaluation is None):
            raise BadGraph(f"{where}: give either field `job` or field `evaluation`")
        if isinstance(member.job, SubmittedJob):
            entries.append((f"{where}.job", member.job))
        elif isinstance(member.evaluation, SubmittedEvaluation):
            all_evaluations.append((f"{where}.evaluation", member.evaluation))
    check_ids([*entries, *all_evaluations])
    ordered = check([job for _, job in entries], [where for where, _ in entries]).jobs
    resolved = Resolved(
        ordered,
        tuple(evaluation for _, evaluation in all_evaluations),
        _places(clusters, [job for _, job in entries], [e for _, e in all_evaluations]),
    )
    _check_knots(resolved)
    return resolved


def by_reference(resolved: Resolved) -> list[SubmittedCluster]:
    """The clusters with every build by its `drv_path`, to be sent beside `resolved.jobs`;
    evaluations stay as they were given."""
    return [
        replace(
            cluster,
            members=[
                member if place.drv_path is None else replace(member, job=place.drv_path)
                for member, place in zip(cluster.members, places, strict=True)
            ],
        )
        for cluster, places in resolved.clusters
    ]


def _members(clusters: Sequence[SubmittedCluster]) -> list[tuple[str, SubmittedMember]]:
    return [
        (f"clusters[{c}].members[{m}]", member)
        for c, cluster in enumerate(clusters)
        for m, member in enumerate(cluster.members)
    ]


def check_ids(entries: Sequence[tuple[str, SubmittedJob | SubmittedEvaluation]]) -> None:
    """Each entry, with its name for errors, has an id of its own if any. Raises: BadGraph."""
    seen: dict[str, str] = {}
    for where, entry in entries:
        if entry.job_id is not None and seen.setdefault(entry.job_id, where) != where:
            raise BadGraph(
                f"{where}: field `job_id` {shown(entry.job_id)} is also that of "
                f"{seen[entry.job_id]}; give each job an id of its own"
            )


def _places(
    clusters: Sequence[SubmittedCluster],
    jobs: Sequence[SubmittedJob],
    evaluations: Sequence[SubmittedEvaluation],
) -> tuple[tuple[SubmittedCluster, tuple[Place, ...]], ...]:
    finder = _Finder(jobs, evaluations)
    ids: set[str] = set()
    placed = []
    for c, cluster in enumerate(clusters):
        where = f"clusters[{c}]"
        if cluster.cluster_id is not None:
            if cluster.cluster_id in ids:
                raise BadGraph(
                    f"{where}: field `cluster_id` {shown(cluster.cluster_id)} is given twice; "
                    "give each cluster an id of its own"
                )
            ids.add(cluster.cluster_id)
        _check_cluster(cluster, where)
        places = []
        for m, index in enumerate(_indexes(cluster, where)):
            member = cluster.members[m]
            drv_path, number = finder.find(member, f"{where}.members[{m}]")
            primary = bool(member.primary)
            places.append(Place(member.role, index, primary, member.pin, drv_path, number))
        placed.append((cluster, tuple(places)))
    return tuple(placed)


class _Finder:
    """The jobs of members, each found once."""

    def __init__(
        self, jobs: Sequence[SubmittedJob], evaluations: Sequence[SubmittedEvaluation]
    ) -> None:
        self._jobs = {job.drv_path: job.drv_path for job in jobs}
        self._jobs |= {job.job_id: job.drv_path for job in jobs if job.job_id is not None}
        self._numbers = {e.job_id: i for i, e in enumerate(evaluations) if e.job_id is not None}
        self._whole = {id(evaluation): i for i, evaluation in enumerate(evaluations)}
        self._taken: dict[str | int | None, str] = {}

    def find(self, member: SubmittedMember, where: str) -> tuple[str | None, int | None]:
        """The drv path of a member's build, or the position of its evaluation."""
        drv_path, number = None, None
        match member.job, member.evaluation:
            case SubmittedJob(drv_path=path), _:
                drv_path = path
            case str() as name, _:
                drv_path = self._jobs.get(name)
                if drv_path is None:
                    raise BadGraph(
                        f"{where}: field `job`: no job of the file has the job_id or drv_path "
                        f"{shown(name)}"
                    )
            case _, SubmittedEvaluation() as evaluation:
                number = self._whole[id(evaluation)]
            case _, name:
                number = self._numbers.get(name or "")
                if number is None:
                    raise BadGraph(
                        f"{where}: field `evaluation`: no evaluation of the file has the job_id "
                        f"{shown(name or '')}"
                    )
        first = self._taken.setdefault(number if drv_path is None else drv_path, where)
        if first != where:
            raise BadGraph(f"{where}: its job is also that of {first}; a job is a member once")
        return drv_path, number


def _check_cluster(cluster: SubmittedCluster, where: str) -> None:
    members = cluster.members
    if not members:
        raise BadGraph(f"{where}: field `members` is empty; a cluster has at least one")
    if len(members) > MAX_MEMBERS:
        raise BadGraph(f"{where}: field `members` has more than {MAX_MEMBERS} entries")
    primaries = [m for m, member in enumerate(members) if member.primary]
    if len(primaries) > 1:
        raise BadGraph(
            f"{where}.members[{primaries[1]}]: field `primary`: members[{primaries[0]}] is it "
            "already; a cluster has at most one"
        )
    pinned: dict[str, int] = {}
    for m, member in enumerate(members):
        if member.pin is not None and pinned.setdefault(member.pin, m) != m:
            raise BadGraph(
                f"{where}.members[{m}]: field `pin`: members[{pinned[member.pin]}] sits on "
                f"worker {shown(member.pin)} already; members sit on distinct workers"
            )


def _indexes(cluster: SubmittedCluster, where: str) -> list[int]:
    """Each member's index within its role: as given, the others in the gaps."""
    given: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for m, member in enumerate(cluster.members):
        sizes[member.role] = sizes.get(member.role, 0) + 1
        if member.index is None:
            continue
        if member.index in given.setdefault(member.role, set()):
            raise BadGraph(
                f"{where}.members[{m}]: field `index`: role {shown(member.role)} has "
                f"{member.index} already"
            )
        given[member.role].add(member.index)
    for m, member in enumerate(cluster.members):
        if member.index is not None and member.index >= sizes[member.role]:
            raise BadGraph(
                f"{where}.members[{m}]: field `index`: {member.index}, but the "
                f"{sizes[member.role]} of role {shown(member.role)} are numbered from 0"
            )
    free = {
        role: iter([i for i in range(size) if i not in given.get(role, ())])
        for role, size in sizes.items()
    }
    return [next(free[m.role]) if m.index is None else m.index for m in cluster.members]


def _check_knots(resolved: Resolved) -> None:
    groups = {
        place.drv_path: str(c)
        for c, (_, places) in enumerate(resolved.clusters)
        for place in places
        if place.drv_path is not None
    }
    knot = find_knot({job.drv_path: job.input_drvs for job in resolved.jobs}, groups)
    if knot is not None:
        cluster = next(groups[drv] for drv, _ in knot if drv in groups)
        told = ", ".join(f"{shown(drv)} needs {shown(needed)}" for drv, needed in knot[:4])
        raise BadGraph(
            f"clusters[{cluster}]: members wait for each other: {told}; members start together, "
            "so none may need another"
        )
