"""Which of a worker's candidates is assigned to it, and why (see docs/scoring.md)."""

from actors.server.scoring.columns import Averages, Bools, Columns, Floats
from actors.server.scoring.decide import Decision, Explanation, Policy, decide, explain
from actors.server.scoring.rules import Rule

__all__ = [
    "Averages",
    "Bools",
    "Columns",
    "Decision",
    "Explanation",
    "Floats",
    "Policy",
    "Rule",
    "decide",
    "explain",
]
