"""The rules of the built-in policies that rank a job by what it costs and how long it waits.

A rule scores and vetoes whole columns; it is stateless and never reads a clock. One number
stands for the same score for every candidate, None for no veto at all.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from actors.server.scoring.columns import (
    Averages,
    Bools,
    Columns,
    Extremes,
    Floats,
    Situation,
    seconds_per_byte,
)

MAX_ESTIMATE_SECS = 3600.0
MAX_WAIT = 4000.0
DEFAULT_WAIT_SECS = 60.0
PRIORITIZED, INTERACTIVE = 5000.0, 1000.0
RESCORE_TICKS = 4
OVERDUE_AFTER_SECS, OVERDUE_PER_SEC = 1800.0, 5.0

__all__ = [
    "EstimatedTime",
    "Overdue",
    "Qos",
    "RescoreWait",
    "Rule",
    "WaitTime",
    "seconds_per_byte",
]


class Rule(Protocol):
    """One reason to prefer a candidate, or to refuse it for now.

    A rule may also have `weight`, the range of its scores in words, and
    `best(extremes)`: what no job of each block scores above. If all rules of a policy have it,
    blocks that cannot hold the winner are passed over; without it all are looked at.

    If all have `key(request)` too, a worker's best candidates are kept from one request to the
    next (see shortlist.py). It is a value that is equal for two requests only if no job that did
    not change itself gets another score or veto, and no equal one where that is not known. A rule
    that never vetoes and looks at nothing else that changes but time and the mean wait may
    instead say that it `varies`, and has, about jobs of which none could start before the oldest,

    - `risen(bound, then, now, oldest_ready_at)`: what no total is above now if none was above
      `bound` then;
    - `limit(subtotal, waited, now)`: what it gives to none more than, if the sum of the rules
      before it is at most `subtotal` for each and the oldest waited so long. Python numbers: this
      is about one set of jobs, `best` about many.
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """One line for people."""

    def score(self, view: Columns) -> Floats | float:
        """What the rule adds to each candidate's total."""

    def veto(self, view: Columns) -> Bools | None:
        """True for each candidate that must not be assigned now."""


class Varying(Protocol):
    """What a rule that `varies` has beside the rest; see `Rule`."""

    varies: bool

    def score(self, view: Columns) -> Floats | float: ...

    def risen(
        self, bound: float, then: Situation, now: Situation, oldest_ready_at: float
    ) -> float: ...

    def limit(self, subtotal: float, waited: float, now: Situation) -> float: ...


class NeverVetoes:
    """The part of a rule that only scores."""

    def veto(self, view: Columns) -> Bools | None:  # noqa: ARG002 - the rule's form
        """Nothing."""
        return None


class EstimatedTime(NeverVetoes):
    name = "estimated-time"
    description = "3600 less the seconds the job is expected to take on this worker"
    weight = "0 to 3600"

    def score(self, view: Columns) -> Floats | float:
        request = view.request
        work = view.of_profile(request.work_secs)
        if view.kind == "eval":
            return _below_limit(work)
        seconds = view.missing_nar_size * request.download_secs_per_byte
        seconds += view.missing_count * view.averages.path_secs
        seconds += work
        present = view.outputs_present
        if present is not None:
            upload = view.of_profile(request.upload_secs)
            np.copyto(seconds, upload, where=present)
        return _below_limit(seconds)

    def key(self, request: Situation) -> object:
        has_history = request.profiles.has_history
        if request.kind == "eval":
            averages = request.averages
            known = (averages.evaluation_secs, averages.evaluation_core_score)
        else:
            known = (request.averages.build_secs, request.averages.path_secs)
        return (
            known,
            request.profiles.version if has_history else None,
            request.load.open_builds if has_history or known[0] else 0,
            request.worker.cpu_core_score,
            request.worker.ram_free_mb if has_history else None,
            request.download_secs_per_byte,
            request.upload_secs_per_byte,
        )

    def best(self, extremes: Extremes) -> float:
        request = extremes.request
        least = float(request.work_secs.min())
        if request.may_have_outputs and request.kind == "build":
            least = min(least, float(request.upload_secs.min()))
        return MAX_ESTIMATE_SECS - min(MAX_ESTIMATE_SECS, least)


def _below_limit(seconds: Floats | float) -> Floats | float:
    if isinstance(seconds, float):
        return MAX_ESTIMATE_SECS - min(MAX_ESTIMATE_SECS, seconds)
    # Comparing all and finding none above it costs a third of taking each one's minimum.
    if np.maximum.reduce(seconds) > MAX_ESTIMATE_SECS:
        seconds = np.minimum(seconds, MAX_ESTIMATE_SECS)
    return np.subtract(MAX_ESTIMATE_SECS, seconds)


class WaitTime(NeverVetoes):
    name = "wait-time"
    description = "60 for each mean wait of the last hour that the job waited, at most 4000"
    weight = "0 to 4000"
    varies = True

    def score(self, view: Columns) -> Floats | float:
        average = _mean_wait(view.averages)
        if average == 0:
            return np.where(view.waited > 0, MAX_WAIT, 0.0)
        score: Floats = view.waited * (60.0 / average)  # dividing each would take 5 times as long
        return (
            np.minimum(score, MAX_WAIT, out=score) if np.maximum.reduce(score) > MAX_WAIT else score
        )

    def best(self, extremes: Extremes) -> Floats:
        average = _mean_wait(extremes.request.averages)
        if average == 0:
            return np.where(extremes.waited > 0, MAX_WAIT, 0.0)
        return np.minimum(MAX_WAIT, extremes.waited * (60.0 / average))

    def risen(self, bound: float, then: Situation, now: Situation, oldest_ready_at: float) -> float:
        was, average = _mean_wait(then.averages), _mean_wait(now.averages)
        if average == 0 or was == 0:
            return bound + MAX_WAIT
        # Whole seconds: one may have become full in no time at all.
        more = (math.floor(now.now - then.now) + 1) * 60.0 / average
        waited = max(0.0, now.now - oldest_ready_at)
        return bound + min(MAX_WAIT, more + waited * max(0.0, 60.0 / average - 60.0 / was))

    def limit(self, subtotal: float, waited: float, now: Situation) -> float:  # noqa: ARG002
        average = _mean_wait(now.averages)
        if average == 0:
            return MAX_WAIT if waited > 0 else 0.0
        return min(MAX_WAIT, waited * (60.0 / average))


def _mean_wait(averages: Averages) -> float:
    return DEFAULT_WAIT_SECS if averages.wait_secs is None else averages.wait_secs


class Qos(NeverVetoes):
    name = "qos"
    description = "5000 for a prioritized job, 1000 if a person at a terminal waits for it"
    weight = "0 to 6000"

    def score(self, view: Columns) -> Floats | float:
        score: Floats | float = 0.0
        if view.block.priorities:
            score = np.multiply(view.prioritized, PRIORITIZED, dtype=np.float64)
        if view.block.interactives:
            score = score + np.multiply(view.interactive, INTERACTIVE, dtype=np.float64)
        return score

    def best(self, extremes: Extremes) -> Floats:
        best: Floats = PRIORITIZED * extremes.prioritized + INTERACTIVE * extremes.interactive
        return best

    def key(self, request: Situation) -> object:  # noqa: ARG002 - the rule's form
        return None


class RescoreWait:
    name = "rescore-wait"
    description = "holds a build back until this worker reported it, for 4 ticks of 5 s at most"
    weight = "veto"

    def score(self, view: Columns) -> float:  # noqa: ARG002 - the rule's form
        return 0.0

    def veto(self, view: Columns) -> Bools | None:
        if view.kind == "eval" or view.all_reported:
            return None
        return ~view.reported & (view.ticks < RESCORE_TICKS)

    def best(self, extremes: Extremes) -> float:  # noqa: ARG002 - the rule's form
        return 0.0

    def key(self, request: Situation) -> object:  # noqa: ARG002 - the rule's form
        """Ticks count for jobs that were not reported, and with those nothing is kept over one."""
        return None


class Overdue(NeverVetoes):
    """Comes last: it looks at the sum of all others."""

    name = "overdue"
    description = "after half an hour lifts a total below 0 by 5 a second, up to 0"
    weight = "up to what lacks to 0"
    varies = True

    def score(self, view: Columns) -> Floats | float:
        if view.now - view.oldest_ready_at <= OVERDUE_AFTER_SECS:
            return 0.0
        lacking = np.negative(view.subtotal)
        if lacking.max() <= 0:
            return 0.0
        earned = (view.waited - OVERDUE_AFTER_SECS) * OVERDUE_PER_SEC
        lift: Floats = np.minimum(earned, lacking)
        return np.maximum(lift, 0.0, out=lift)

    def best(self, extremes: Extremes) -> Floats:
        lacking = np.maximum(0.0, -extremes.subtotal)
        return np.where(extremes.waited > OVERDUE_AFTER_SECS, lacking, 0.0)

    def risen(
        self,
        bound: float,
        then: Situation,  # noqa: ARG002 - the rule's form
        now: Situation,
        oldest_ready_at: float,
    ) -> float:
        is_overdue = now.now - oldest_ready_at > OVERDUE_AFTER_SECS
        return max(bound, 0.0) if is_overdue else bound

    def limit(self, subtotal: float, waited: float, now: Situation) -> float:  # noqa: ARG002
        return max(0.0, -subtotal) if waited > OVERDUE_AFTER_SECS else 0.0
