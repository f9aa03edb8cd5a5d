"""`headrace explain` and `headrace rules`."""

from __future__ import annotations

import json

import pytest

from transport import messages as m

WORKER = {
    "worker": "w-1", "name": "amber", "eligible": True, "code": "outranked",
    "why_not": "2 other jobs come first", "total": 3600.5, "vetoes": [],
    "rules": {"estimated-time": 3540.5, "wait-time": 60.0, "qos": 0.0}, "outranked_by": 2,
    "would_change": "headrace prioritize", "last_request": None,
}  # fmt: skip
AWAY = {"worker": "w-2", "name": "birch", "last_seen_secs": 185.0, "eligible": False,
        "why_not": "does not build for x86_64-linux"}  # fmt: skip
DECISION = {
    "assignment_id": "a-1", "worker": "w-1", "claimed_at": "2026-01-02T03:04:05.000+00:00",
    "closed_at": None, "outcome": None, "error": None, "total": 60.0,
    "rules": {"wait-time": 60.0, "qos": 0.0}, "missing_nar_size": None, "missing_count": None,
    "rejected": [{"job_id": "j-2", "total": 59.0}],
}  # fmt: skip


def explanation(code: str, text: str = "because", **more: object) -> dict[str, object]:
    return {
        "job_id": "j-1", "kind": "build", "name": "hello", "status": "Queued",
        "reason": {"code": code, "text": text}, "workers": [], "away": [], "decisions": [],
    } | more  # fmt: skip


def reply(told: dict[str, object]) -> m.CmdExplainReply:
    return m.CmdExplainReply(request=0, explanation=told)


def test_a_waiting_job_is_told_reason_first_then_worker_by_worker(server, headrace) -> None:
    told = explanation("outranked", "amber: 2 other jobs come first", workers=[WORKER], away=[AWAY])
    server.on(m.CmdExplain, reply(told))
    code, out, err = headrace("explain", "j-1")
    assert (code, err) == (0, "")
    assert out == (
        "j-1 hello (build) is Queued\n"
        "outranked: amber: 2 other jobs come first\n"
        "\n"
        "worker  state      total   before it  estimated-time  wait-time\n"
        "amber   outranked  3600.5  2          3540.5          60.0\n"
        "\n"
        "amber: 2 other jobs come first; would change it: headrace prioritize\n"
        "birch: last seen 3m 05s ago, does not build for x86_64-linux\n"
    )
    assert server.requests == [m.CmdExplain(request=1, job="j-1")]


def test_a_running_job_is_told_with_its_decision(server, headrace) -> None:
    server.on(m.CmdExplain, reply(explanation("running", "on worker w-1", decisions=[DECISION])))
    code, out, _ = headrace("explain", "j-1")
    assert code == 0
    assert out.splitlines()[2:] == [
        "",
        "a-1: to w-1 at 2026-01-02T03:04:05.000+00:00, running",
        "  total 60.0: wait-time 60.0",
        "  before j-2 with 59.0",
    ]


@pytest.mark.parametrize(
    ("candidates", "best", "text"),
    [
        (0, [], "there was no candidate"),
        (2, [], "all 2 candidates were vetoed"),
        (3, [{"job_id": "j-2", "total": -5000.0}],
         "the best of 3 candidates, j-2, had -5000.0"),
    ],
)  # fmt: skip
def test_a_request_left_unanswered_is_told(server, headrace, candidates, best, text) -> None:
    asked = {"secs_ago": 4.0, "candidates": candidates, "best": best}
    told = explanation("below_floor", workers=[WORKER | {"last_request": asked}])
    server.on(m.CmdExplain, reply(told))
    _, out, _ = headrace("explain", "j-1")
    assert out.splitlines()[-1] == f"  it asked 4s ago and got nothing: {text}"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("no_worker", 5), ("no_system", 5), ("no_feature", 5), ("wrong_kind", 5), ("drained", 5),
     ("not_authorized", 5), ("inputs", 0), ("all_full", 0), ("outranked", 0), ("unscored", 0),
     ("below_floor", 0), ("held_memory", 0), ("retry_at", 0), ("ended", 0)],
)  # fmt: skip
def test_the_exit_code_says_whether_somebody_must_act(
    server, headrace, reason: str, expected: int
) -> None:
    told = explanation(reason)
    server.on(m.CmdExplain, reply(told))
    code, out, err = headrace("explain", "j-1", "--json", "--exit-code")
    assert (code, err) == (expected, "")
    assert json.loads(out) == told
    assert headrace("explain", "j-1")[0] == 0


def test_inputs_are_named(server, headrace) -> None:
    reason = {"code": "inputs", "text": "waits for 1 of its inputs", "inputs": [
        {"drv_path": "/a.drv", "job_id": "j-0", "name": "a\x1b[2J", "status": "Building"}
    ]}  # fmt: skip
    server.on(m.CmdExplain, reply(explanation("inputs") | {"reason": reason}))
    _, out, _ = headrace("explain", "j-1")
    assert "  needs a?[2J (j-0): Building\n" in out


def test_rules_are_listed_without_a_server(headrace) -> None:
    code, out, err = headrace("rules")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("resource-aware: ")
    assert any(line.startswith("  overdue ") for line in lines)
    assert any("off by default" in line for line in lines)
    code, out, _ = headrace("rules", "--json")
    policies = {policy["name"]: policy for policy in json.loads(out)}
    assert code == 0
    assert {"simple", "resource-aware"} <= policies.keys()
    names = [rule["name"] for rule in policies["simple"]["rules"]]
    assert names[0] == "estimated-time"
    assert names[-1] == "overdue"
    assert "resource-saturation" not in names
    for policy in policies.values():
        assert all(rule["description"] and rule["weight"] for rule in policy["rules"])
