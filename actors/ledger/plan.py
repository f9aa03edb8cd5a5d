"""Checks an admission by itself, before the ledger is asked."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import Refused
from .records import Admission, JobRecord

_ROWS_PER_JOB = 4  # drv, job, body, requester; an edge makes two more


def entry(index: int, job: JobRecord) -> str:
    """How a message names a job of the admission."""
    return f"entry {index} ({job.name})"


class Plan:
    """What an admission brings.

    Raises: Refused.
    """

    def __init__(self, admission: Admission) -> None:
        self.jobs: Sequence[JobRecord] = admission.jobs
        self.own: dict[str, int] = {}
        """Index in `jobs` by drv path."""
        self.outside: dict[str, int] = {}
        """Inputs that are not among the jobs, with the first job that names each."""
        self.rows = len(admission.sizes) + _ROWS_PER_JOB * len(self.jobs)
        """About how many rows it writes."""
        ids: dict[str, int] = {}
        for index, job in enumerate(self.jobs):
            _check(index, job)
            if (first := ids.setdefault(job.job_id, index)) != index:
                raise Refused(
                    f"{entry(index, job)}: job_id: {job.job_id!r} is also entry {first}'s"
                )
            if job.drv_path is not None:
                first = self.own.setdefault(job.drv_path, index)
                if first != index:
                    raise Refused(
                        f"{entry(index, job)}: drv_path: {job.drv_path} is also entry {first}'s"
                    )
        for index, job in enumerate(self.jobs):
            self.rows += 2 * len(job.inputs)
            for path in job.inputs:
                if path not in self.own:
                    self.outside.setdefault(path, index)


def _check(index: int, job: JobRecord) -> None:
    if job.kind == "eval":
        if job.drv_path is not None or job.inputs:
            raise Refused(f"{entry(index, job)}: drv_path: an evaluation has none, nor inputs")
        return
    if job.drv_path is None or not job.drv_path.startswith("/"):
        raise Refused(f"{entry(index, job)}: drv_path: {job.drv_path!r} is not an absolute path")
    if job.drv_path in job.inputs:
        raise Refused(f"{entry(index, job)}: input_drvs: it names itself")
