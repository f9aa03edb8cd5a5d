"""The policies by name: two of our own, others through entry points."""

from __future__ import annotations

from importlib.metadata import entry_points

from actors.server.scoring import Policy
from actors.server.scoring.rules import EstimatedTime, Qos, RescoreWait, WaitTime

DEFAULT_POLICY = "resource-aware"
ENTRY_POINT_GROUP = "headrace.policies"

_RULES = (EstimatedTime(), WaitTime(), Qos(), RescoreWait())

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("simple", "the soonest finish, waiting time and priority", _RULES),
        Policy(DEFAULT_POLICY, "as simple, and with regard to each machine's load", _RULES),
    )
}


class PolicyError(Exception):
    """A policy that cannot be used; the text is one line that says what to do."""


class UnknownPolicy(PolicyError):
    """No policy has this name."""


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
