"""An example of a policy that another package brings: `simple`, and big jobs go to big machines.

A rule is an object with a name, a description, `score` and `veto`; both see columns with a value
for each candidate. A policy is a table of rules; `overdue` looks at the sum of those before it
and comes last.
"""

from __future__ import annotations

import numpy as np

from actors.server.policies import POLICIES
from actors.server.scoring import Bools, Columns, Extremes, Floats, Policy

BIG_SECS = 600.0


class BigOnBig:
    """Keeps machines with many cores for builds that take long."""

    name = "big-on-big"
    description = "-500 for a build of less than 10 minutes on a machine of 32 cores or more"
    weight = "-500 or 0"

    def score(self, view: Columns) -> Floats | float:
        """One number stands for the same score for all."""
        if view.kind == "eval" or (view.worker.cpu_count or 0) < 32:
            return 0.0
        seconds = view.of_profile(view.request.run_secs)
        return np.where(np.less(seconds, BIG_SECS), -500.0, 0.0) + np.zeros(len(view.ticks))

    def veto(self, view: Columns) -> Bools | None:
        """None = nothing is vetoed."""
        return None

    def best(self, extremes: Extremes) -> float:
        """Optional: what it gives to no job more than, so that most of a long queue need not be
        looked at."""
        return 0.0


_SIMPLE = POLICIES["simple"].rules
POLICY = Policy(
    "night-shift",
    "as simple, with big machines for big builds",
    (*_SIMPLE[:-1], BigOnBig(), _SIMPLE[-1]),
)
