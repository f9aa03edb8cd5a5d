"""What the worker asks of whatever runs its jobs.

An executor raises only for its own bugs; all that can go wrong with a job is an outcome.
It stops a job when its `run_*` is cancelled, and returns from there only once nothing of the
job runs any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

from msgspec import Struct

from actors.worker.signals import Member
from transport import messages as m

MAX_ERROR_CHARACTERS = 8_000
_MAX_SIZE = 2**63 - 1


class Built(Struct, frozen=True):
    """A build whose outputs are all valid in the store."""

    outputs: dict[str, m.Output]
    substituted: bool = False
    metrics: m.BuildMetrics | None = None
    spans: list[m.Span] = []


class Evaluated(Struct, frozen=True):
    """An evaluation all of whose derivations were reported before."""

    spans: list[m.Span] = []


class Failed(Struct, frozen=True):
    kind: m.FailureKind
    error: str
    missing_paths: list[str] = []
    metrics: m.BuildMetrics | None = None
    spans: list[m.Span] = []


Outcome = Built | Evaluated | Failed


class JobContext(Protocol):
    """One running job's way to report. Every `async` method may wait for room."""

    @property
    def job_id(self) -> str: ...

    @property
    def assignment_id(self) -> str: ...

    @property
    def spans(self) -> Spans: ...

    @property
    def member(self) -> Member | None:
        """For a cluster member that runs: how its process reaches the others."""
        ...

    async def log(self, data: bytes) -> None:
        """Output of the builder, of any size."""
        ...

    async def update(self, update: m.AnyUpdate) -> None:
        """`Fetching`, `Evaluating`, or a batch of at most 50 derivations."""
        ...

    async def advance_build(
        self,
        phase: Literal["prefetch", "build", "upload"],
        *,
        bytes_done: int | None = None,
        bytes_total: int | None = None,
        paths_done: int | None = None,
        paths_total: int | None = None,
    ) -> None: ...

    async def known(self, drv_paths: Sequence[str]) -> set[str]:
        """Which of these an evaluation has already reported whole; none when the server does not
        answer in time. At most `m.MAX_KNOWN_ASKED` at once."""
        ...

    async def advance_eval(self, derivations: int) -> None:
        """How many derivations were found so far; passed on at most once a second."""
        ...

    def observe_peak(self, ram_mb: int) -> None:
        """The build's peak of memory so far, for the heartbeat."""
        ...


class Executor(Protocol):
    @property
    def fetches(self) -> bool:
        """Whether evaluations may name sources that must be fetched."""
        ...

    def start(self) -> None:
        """Makes ready and cleans up after a worker that was killed. Runs in a thread.

        Raises `OSError` when the store cannot be used.
        """
        ...

    def score(self, candidates: Sequence[m.JobCandidate]) -> list[m.Score]:
        """One score for every candidate, in their order. Runs in a thread of its own."""
        ...

    async def run_build(self, job: m.BuildJob, context: JobContext) -> Built | Failed: ...

    async def run_eval(self, job: m.EvalJob, context: JobContext) -> Evaluated | Failed: ...

    async def close(self) -> None:
        """Lets go of everything, once no job runs any more."""
        ...


class Spans:
    """The phases of one job, in milliseconds since it was assigned."""

    def __init__(self, started: float | None = None) -> None:
        self._started = time.monotonic() if started is None else started
        self._done: list[m.Span] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records a span, also of a phase that ends by an error."""
        start = self._now_ms()
        try:
            yield
        finally:
            self._done.append(m.Span(phase=name, start_ms=start, end_ms=self._now_ms()))

    def done(self) -> list[m.Span]:
        """The phases that have ended so far."""
        return list(self._done)

    def _now_ms(self) -> int:
        return max(0, round((time.monotonic() - self._started) * 1000))


def _unknown(_: str) -> None:
    return None


def score_candidates(
    candidates: Iterable[m.JobCandidate],
    is_valid: Callable[[str], bool],
    nar_size: Callable[[str], int | None] = _unknown,
) -> list[m.Score]:
    """Scores by asking for one path after the other; a path that raises `OSError` is missing.

    `nar_size` is asked for the bytes of missing paths of which the server knows none.
    """
    known: dict[str, bool] = {}

    def holds(path: str) -> bool:
        if path not in known:
            try:
                known[path] = is_valid(path)
            except OSError:
                known[path] = False
        return known[path]

    scores = []
    for candidate in candidates:
        missing = [p for p in candidate.required_paths if not holds(p.path)]
        outputs = candidate.output_paths
        is_done = bool(outputs) and all(map(holds, outputs))
        scores.append(_score(candidate, missing, is_done, nar_size))
    return scores


def score_as_missing(candidates: Iterable[m.JobCandidate]) -> list[m.Score]:
    """What is true of any store at worst: nothing is there."""
    return [_score(c, c.required_paths, False, _unknown) for c in candidates]


def _score(
    candidate: m.JobCandidate,
    missing: Sequence[m.RequiredPath],
    outputs_present: bool,
    nar_size: Callable[[str], int | None],
) -> m.Score:
    sizes = (nar_size(p.path) or 0 if p.nar_size is None else p.nar_size for p in missing)
    return m.Score(
        job_id=candidate.job_id,
        missing_count=len(missing),
        missing_nar_size=min(sum(sizes), _MAX_SIZE),
        outputs_present=outputs_present,
    )
