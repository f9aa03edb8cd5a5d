"""A submission cut into messages that fit a frame. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bin.errors import CommandError
from transport.messages import (
    CmdSubmit,
    SubmittedCluster,
    SubmittedEvaluation,
    SubmittedJob,
)

PART_BYTES = 4 * 2**20
MAX_PARTS = 256
# Sizes are taken in MessagePack, which is compiled and at most a few per cent smaller than CBOR.
_SIZED_BYTES = PART_BYTES * 7 // 8
_MAX_ENTRIES = 50_000  # of small ones; bounds what a server decodes in one go

_size = msgspec.msgpack.Encoder()


def cut(
    jobs: Sequence[SubmittedJob],
    evaluations: Sequence[SubmittedEvaluation],
    clusters: Sequence[SubmittedCluster] = (),
    *,
    assume_inputs_built: bool = False,
    interactive: bool = False,
) -> list[CmdSubmit]:
    """The parts of one submission: jobs in their order, then evaluations, then clusters; the
    last is final.

    A part is at most PART_BYTES encoded, but a single larger job goes alone. The request
    number is left 0.

    Raises:
        CommandError: it takes more than MAX_PARTS.
    """
    parts: list[CmdSubmit] = []
    part, size = _part(assume_inputs_built, interactive), 0
    entries: list[SubmittedJob | SubmittedEvaluation | SubmittedCluster]
    entries = [*jobs, *evaluations, *clusters]
    for entry in entries:
        more = len(_size.encode(entry))
        held = len(part.jobs) + len(part.evaluations) + len(part.clusters)
        if held and (size + more > _SIZED_BYTES or held >= _MAX_ENTRIES):
            parts.append(part)
            part, size = _part(assume_inputs_built, interactive), 0
        if isinstance(entry, SubmittedJob):
            part.jobs.append(entry)
        elif isinstance(entry, SubmittedEvaluation):
            part.evaluations.append(entry)
        else:
            part.clusters.append(entry)
        size += more
    if len(parts) >= MAX_PARTS:
        raise CommandError(
            f"the submission is larger than {MAX_PARTS} parts of {PART_BYTES} bytes; submit it "
            "in several files, inputs first"
        )
    return [*parts, msgspec.structs.replace(part, is_final=True)]


def _part(assume_inputs_built: bool, interactive: bool) -> CmdSubmit:
    return CmdSubmit(
        request=0,
        is_final=False,
        jobs=[],
        evaluations=[],
        clusters=[],
        assume_inputs_built=assume_inputs_built,
        interactive=interactive,
    )
