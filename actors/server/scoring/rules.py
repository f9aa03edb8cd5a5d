"""The rules of the built-in policies.

A rule scores and vetoes whole columns; it is stateless and never reads a clock. One number
stands for the same score for every candidate, None for no veto at all.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from actors.server.scoring.columns import Bools, Columns, Floats

READ_SHARE_MBPS, WRITE_SHARE_MBPS = 1200.0, 1120.0
"""What all transfers in one direction share."""
SECS_PER_PATH = 0.18
MAX_ESTIMATE_SECS = 3600.0
_NEVER = 1e12
"""Seconds a byte at a speed of zero: beyond every estimate, but 0 bytes still take 0."""


class Rule(Protocol):
    """One reason to prefer a candidate, or to refuse it for now."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """One line for people."""

    def score(self, view: Columns) -> Floats | float:
        """What the rule adds to each candidate's total."""

    def veto(self, view: Columns) -> Bools | None:
        """True for each candidate that must not be assigned now."""


def seconds_per_byte(
    speed_mbps: float | None, fleet_mbps: float | None, share_mbps: float, in_flight: int
) -> float:
    """What one more transfer beside those in flight takes. An unknown speed is the fleet's
    mean; without that only the share counts."""
    rate = share_mbps / (in_flight + 1)
    known = fleet_mbps if speed_mbps is None else speed_mbps
    if known is not None:
        rate = min(known, rate)
    return min(8e-6 / rate, _NEVER) if rate > 0 else _NEVER


class EstimatedTime:
    name = "estimated-time"
    description = "3600 less the seconds the job is expected to take on this worker"

    def score(self, view: Columns) -> Floats | float:
        if view.kind == "eval":
            return MAX_ESTIMATE_SECS  # nothing is known of evaluations without a history
        worker, averages = view.worker, view.averages
        download = seconds_per_byte(
            worker.download_speed_mbps, averages.download_mbps, READ_SHARE_MBPS, averages.downloads
        )
        upload = seconds_per_byte(
            worker.upload_speed_mbps, averages.upload_mbps, WRITE_SHARE_MBPS, averages.uploads
        )
        seconds = view.missing_nar_size * download
        seconds += view.missing_count * SECS_PER_PATH
        np.putmask(seconds, view.outputs_present, 0.0)
        if view.has_output_sizes:
            seconds += np.nan_to_num(view.output_size) * upload
        np.minimum(seconds, MAX_ESTIMATE_SECS, out=seconds)
        return np.subtract(MAX_ESTIMATE_SECS, seconds, out=seconds)

    def veto(self, view: Columns) -> None:  # noqa: ARG002 - the rule's form
        return None


class WaitTime:
    name = "wait-time"
    description = "60 for each mean wait of the last hour that the job waited, at most 4000"

    def score(self, view: Columns) -> Floats | float:
        average = view.averages.wait_secs
        if average is None:
            average = 60.0
        if average == 0:
            return np.where(view.waited > 0, 4000.0, 0.0)
        score: Floats = view.waited * 60.0
        score /= average
        return np.minimum(score, 4000.0, out=score)

    def veto(self, view: Columns) -> None:  # noqa: ARG002 - the rule's form
        return None


class Qos:
    name = "qos"
    description = "5000 for a prioritized job, 1000 if a person at a terminal waits for it"

    def score(self, view: Columns) -> Floats | float:
        # Most blocks have none of one or the other; asking costs a tenth of adding zeros.
        score: Floats | float = 0.0
        if view.prioritized.any():
            score = np.multiply(view.prioritized, 5000.0, dtype=np.float64)
        if view.interactive.any():
            score = score + np.multiply(view.interactive, 1000.0, dtype=np.float64)
        return score

    def veto(self, view: Columns) -> None:  # noqa: ARG002 - the rule's form
        return None


class RescoreWait:
    name = "rescore-wait"
    description = "holds a build back until this worker reported it, for 4 ticks of 5 s at most"

    def score(self, view: Columns) -> float:  # noqa: ARG002 - the rule's form
        return 0.0

    def veto(self, view: Columns) -> Bools | None:
        if view.kind == "eval":
            return None
        return ~view.reported & (view.ticks < 4)
