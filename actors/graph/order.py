"""Whether submitted builds form a graph that can be built, and in which order.

Pure: no file, clock or socket. The server checks what it is sent, a command what it sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from transport.messages import SubmittedJob

MAX_NAMES_IN_CYCLE = 8


class BadGraph(ValueError):
    """What was submitted cannot be taken; the message is one line that names entry and field."""


class Checked(Struct, frozen=True):
    """Builds that may be admitted."""

    jobs: tuple[SubmittedJob, ...]
    """Inputs before what needs them; jobs that stood in such an order keep it."""
    unknown_inputs: frozenset[str]
    """drv paths of inputs that are not among the jobs."""


def check(jobs: Sequence[SubmittedJob], names: Sequence[str] | None = None) -> Checked:
    """Order `jobs`, inputs first. `names` says in errors which entries they are, `jobs[0]` and so
    on without it.

    Raises:
        BadGraph: a derivation or job id stands twice, a path is not absolute, an output path
            belongs to two derivations, or derivations need each other in a cycle.
    """
    index = _index(jobs, names or [f"jobs[{i}]" for i in range(len(jobs))])
    _check_outputs(jobs)
    order, unknown = _sort(jobs, index)
    return Checked(tuple(jobs[i] for i in order), frozenset(unknown))


def shown(text: str) -> str:
    """Text of a file, fit for one line of an error: control characters escaped, cut at 200."""
    line = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return line if len(line) <= 200 else f"{line[:200]}..."


def _index(jobs: Sequence[SubmittedJob], names: Sequence[str]) -> dict[str, int]:
    index: dict[str, int] = {}
    ids: dict[str, str] = {}
    for position, job in enumerate(jobs):
        drv = job.drv_path
        if not drv.startswith("/"):
            raise BadGraph(
                f"{names[position]} ({shown(drv)}): field `drv_path` must be an absolute path, "
                "such as /nix/store/<hash>-<name>.drv"
            )
        if index.setdefault(drv, position) != position:
            raise BadGraph(
                f"{names[position]}: derivation {shown(drv)} was already given as "
                f"{names[index[drv]]}; give each derivation once"
            )
        if job.job_id is not None and ids.setdefault(job.job_id, drv) != drv:
            raise BadGraph(
                f"{names[position]} ({shown(drv)}): field `job_id` {shown(job.job_id)} is also "
                f"the id of {shown(ids[job.job_id])}; give each job an id of its own"
            )
    return index


def _check_outputs(jobs: Sequence[SubmittedJob]) -> None:
    """An output path has one owner, or owners with the very same outputs.

    Real graphs hold such twins: Nix names the outputs of a fixed-output derivation after their
    hash alone, and those of any derivation after its inputs *modulo* how fixed-output ones are
    fetched. Two fetchers of one source, and all that is built of it for each, coincide.
    """
    owners: dict[str, SubmittedJob] = {}
    for job in jobs:
        for name, path in job.outputs.items():
            owner = owners.setdefault(path, job)
            if owner is not job and owner.outputs != job.outputs:
                raise BadGraph(
                    f"{shown(job.drv_path)}: field `outputs.{shown(name)}`: {shown(path)} is "
                    f"also an output of {shown(owner.drv_path)}, whose outputs differ; "
                    "one path is built by one derivation"
                )


def _sort(jobs: Sequence[SubmittedJob], index: dict[str, int]) -> tuple[list[int], set[str]]:
    """Depth first in the order given; a path of its own, since graphs are deeper than stacks."""
    new, on_path, done = 0, 1, 2
    state = bytearray(len(jobs))
    order: list[int] = []
    unknown: set[str] = set()
    for start in range(len(jobs)):
        if state[start] != new:
            continue
        state[start] = on_path
        path = [start]
        pending: list[Iterator[str]] = [iter(jobs[start].input_drvs)]
        while path:
            for drv in pending[-1]:
                i = index.get(drv)
                if i is None:
                    unknown.add(drv)
                elif state[i] == new:
                    state[i] = on_path
                    path.append(i)
                    pending.append(iter(jobs[i].input_drvs))
                    break
                elif state[i] == on_path:
                    raise BadGraph(_cycle([jobs[n].drv_path for n in path[path.index(i) :]]))
            else:
                pending.pop()
                i = path.pop()
                state[i] = done
                order.append(i)
    return order, unknown


def _cycle(drvs: list[str]) -> str:
    if len(drvs) == 1:
        return f"{shown(drvs[0])}: field `input_drvs` names the derivation itself; take it out"
    names = [shown(drv) for drv in drvs]
    if len(names) > MAX_NAMES_IN_CYCLE:
        half = MAX_NAMES_IN_CYCLE // 2
        names[half:-half] = [f"({len(names) - 2 * half} more)"]
    loop = " -> ".join([*names, shown(drvs[0])])
    return f"derivations need each other in a cycle: {loop}; take one of these `input_drvs` out"
