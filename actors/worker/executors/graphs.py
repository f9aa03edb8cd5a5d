"""Evaluating a graph file: what it holds is what is to be built."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from pathlib import Path

import msgspec
import trio

from actors.graph.files import read_submission
from actors.graph.order import BadGraph, check
from actors.worker.executors.base import Evaluated, Failed, JobContext
from transport import messages as m

MAX_GRAPH_BYTES = 512 * 2**20
_BATCH_BYTES = 2**20
_MAX_DERIVATION_BYTES = m.MAX_FRAME_BYTES - 2**16  # one frame with all around it
_FIELDS = m.Derivation.__struct_fields__


async def run_graph_file(job: m.EvalJob, context: JobContext) -> Evaluated | Failed:
    """Evaluates a source of kind `graph-file`."""
    with trio.move_on_after(job.timeout_secs or inf):
        try:
            with context.spans.phase("evaluate"):
                await _report_graph(job, context)
        except BadGraph as error:
            return Failed("Permanent", str(error), spans=context.spans.done())
        return Evaluated(spans=context.spans.done())
    return Failed("Timeout", f"the evaluation took more than {job.timeout_secs} s")


async def _report_graph(job: m.EvalJob, context: JobContext) -> None:
    await context.update(m.Evaluating())
    derivations = await trio.to_thread.run_sync(
        read_graph, job.source.ref, job.attributes, abandon_on_cancel=True
    )
    reported = 0
    for batch in batches(derivations):
        await context.update(m.EvalResult(batch, warnings=[], errors=[]))
        reported += len(batch)
        await context.advance_eval(reported)


def read_graph(ref: str, attributes: Sequence[str]) -> list[m.Derivation]:
    """The derivations of the file `ref`, inputs first.

    With `attributes` only the derivations of these names and all that they need.

    Raises:
        BadGraph: the file cannot be read or taken; the text is one line.
    """
    path = Path(ref)
    try:
        if path.stat().st_size > MAX_GRAPH_BYTES:
            raise BadGraph(f"{ref}: larger than {MAX_GRAPH_BYTES // 2**20} MiB; split the graph")
        data = path.read_bytes()
    except OSError as error:
        raise BadGraph(
            f"cannot read the graph file {ref}: {error.strerror}; the worker must have it"
        ) from None
    except ValueError:
        raise BadGraph(f"{ref!r} is not a file name") from None
    submission = read_submission(data, ref)
    if submission.clusters:
        raise BadGraph(f"{ref}: an evaluation reports no clusters: submit the file instead")
    jobs = list(check(submission.jobs).jobs)
    if not jobs:
        raise BadGraph(f"{ref}: holds no builds")
    if attributes:
        jobs = _needed(jobs, attributes, ref)
    return list(map(as_derivation, jobs))


def as_derivation(job: m.SubmittedJob) -> m.Derivation:
    """The part of a job that an evaluation reports."""
    return m.Derivation(**{name: getattr(job, name) for name in _FIELDS})


def batches(derivations: Iterable[m.Derivation]) -> Iterator[list[m.Derivation]]:
    """Pieces that fit one `EvalResult` each, in order.

    Raises:
        BadGraph: a derivation is too large to be sent at all.
    """
    batch: list[m.Derivation] = []
    size = 0
    for derivation in derivations:
        own = len(msgspec.msgpack.encode(derivation))
        if own > _MAX_DERIVATION_BYTES:
            raise BadGraph(f"{derivation.drv_path}: args and env of {own} bytes are too large")
        if batch and (len(batch) == m.MAX_EVAL_BATCH or size + own > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(derivation)
        size += own
    if batch:
        yield batch


def _needed(
    jobs: list[m.SubmittedJob], attributes: Sequence[str], ref: str
) -> list[m.SubmittedJob]:
    by_drv = {job.drv_path: job for job in jobs}
    wanted = set(attributes)
    named = [job.drv_path for job in jobs if job.name in wanted]
    unknown = wanted - {job.name for job in jobs}
    if unknown:
        raise BadGraph(f"{ref}: no derivation is named {min(unknown)!r}")
    needed: set[str] = set()
    pending = deque(named)
    while pending:
        drv = pending.popleft()
        if drv in by_drv and drv not in needed:
            needed.add(drv)
            pending.extend(by_drv[drv].input_drvs)
    return [job for job in jobs if job.drv_path in needed]
