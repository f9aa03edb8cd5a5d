"""The policies by name: two of our own, others through entry points."""

from __future__ import annotations

from importlib.metadata import entry_points

from msgspec.structs import replace

from actors.server.scoring import Policy
from actors.server.scoring.load_rules import (
    FairShare,
    ReserveFetchWorkers,
    ResourceSaturation,
    TransferLimit,
)
from actors.server.scoring.rules import EstimatedTime, Overdue, Qos, RescoreWait, WaitTime

DEFAULT_POLICY = "resource-aware"
ENTRY_POINT_GROUP = "headrace.policies"

_RULES = (
    EstimatedTime(), WaitTime(), Qos(), RescoreWait(), ReserveFetchWorkers(), TransferLimit(),
)  # fmt: skip

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("simple", "the soonest finish, waiting time and priority", (*_RULES, Overdue())),
        Policy(
            DEFAULT_POLICY,
            "as simple, and with regard to each machine's load and memory",
            (*_RULES, ResourceSaturation(), Overdue()),
        ),
    )
}
FAIR_SHARE = FairShare()
"""Off by default, see `with_fair_share`."""


class PolicyError(Exception):
    """A policy that cannot be used; the text is one line that says what to do."""


class UnknownPolicy(PolicyError):
    """No policy has this name."""


def with_fair_share(policy: Policy) -> Policy:
    """The policy with the rule `fair-share`. Raises `PolicyError` unless it is
    `resource-aware`."""
    if policy.name != DEFAULT_POLICY:
        raise PolicyError(f"policy '{policy.name}' has no fair-share; {DEFAULT_POLICY} has")
    return replace(policy, rules=(*policy.rules[:-1], FAIR_SHARE, policy.rules[-1]))


def known_policies() -> list[str]:
    """Names of all policies, those of other packages included, in order."""
    others = entry_points(group=ENTRY_POINT_GROUP).names
    return sorted({*POLICIES, *others})


def load_policy(name: str) -> Policy:
    """The policy of that name. One of another package must not take a built-in's name.

    Raises `UnknownPolicy`, or `PolicyError` when the package's entry point gives no policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        known = ", ".join(known_policies())
        raise UnknownPolicy(f"unknown policy '{name}'; known are: {known}")
    try:
        policy = found[0].load()
    except Exception as error:  # whatever the package raises
        raise PolicyError(
            f"policy '{name}' ({found[0].value}) cannot be loaded: {error}"
        ) from error
    if not isinstance(policy, Policy):
        raise PolicyError(f"policy '{name}' ({found[0].value}) is not a headrace Policy")
    return policy
