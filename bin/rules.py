"""`headrace rules`: the policies, and the rules that each is made of."""

from __future__ import annotations

from typing import Any

import click

from actors.server.policies import (
    DEFAULT_POLICY,
    FAIR_SHARE,
    PolicyError,
    known_policies,
    load_policy,
)
from actors.server.scoring import Rule
from bin.options import json_option
from bin.output import note, print_json, print_table, say


@click.command()
@json_option
def rules(as_json: bool) -> None:
    """List policies and rules, with what each is worth."""
    policies: list[dict[str, Any]] = []
    for name in known_policies():
        try:
            policy = load_policy(name)
        except PolicyError as error:
            note(str(error))
            continue
        listed = [_described(rule, is_default=True) for rule in policy.rules]
        if name == DEFAULT_POLICY:
            listed.insert(-1, _described(FAIR_SHARE, is_default=False))
        policies.append({"name": name, "description": policy.description, "rules": listed})
    if as_json:
        print_json(policies)
        return
    for told in policies:
        say(f"{told['name']}: {told['description']}")
        print_table(
            ["  rule", "score", "description"],
            [[f"  {r['name']}", r["weight"], r["description"]] for r in told["rules"]],
        )
        say("")


def _described(rule: Rule, *, is_default: bool) -> dict[str, Any]:
    return {
        "name": rule.name,
        "weight": getattr(rule, "weight", ""),
        "description": rule.description,
        "on_by_default": is_default,
    }
