"""Which of a worker's candidates is assigned to it, and why (see docs/scoring.md)."""

from actors.server.scoring.columns import Averages, Bools, Columns, Extremes, Floats, Situation
from actors.server.scoring.decide import Decider, Decision, NoWinner, decide
from actors.server.scoring.look import Explanation, explain, find_held, outranking
from actors.server.scoring.rules import NeverVetoes, Rule
from actors.server.scoring.scan import Faults, Policy

__all__ = [
    "Averages",
    "Bools",
    "Columns",
    "Decider",
    "Decision",
    "Explanation",
    "Extremes",
    "Faults",
    "Floats",
    "NeverVetoes",
    "NoWinner",
    "Policy",
    "Rule",
    "Situation",
    "decide",
    "explain",
    "find_held",
    "outranking",
]
