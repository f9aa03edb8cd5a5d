"""`headrace health`."""

from __future__ import annotations

import json

import pytest

from transport import messages as m


@pytest.mark.parametrize("problems", [[], ["actor pager is down"], ["one", "two\x1b[31m"]])
def test_health_is_one_line_and_an_exit_code(headrace, server, problems):
    server.on(m.CmdHealth, m.CmdHealthReply(request=0, problems=problems))
    code, out, err = headrace("health")
    assert (code, err) == (bool(problems), "")
    assert out.count("\n") == 1
    assert "\x1b" not in out
    assert out.startswith("; ".join(problems)[:8] or "ok\n")
    code, out, err = headrace("health", "--json")
    assert (code, json.loads(out)) == (bool(problems), {"ok": not problems, "reasons": problems})


def test_a_server_that_is_gone_or_does_not_answer_is_not_healthy(headrace, server):
    code, out, err = headrace("health", "--timeout", "0.2")
    assert (code, err) == (3, "")
    assert "no answer" in out
    server.down = 1_000
    code, out, err = headrace("health", "--json")
    assert (code, err) == (3, "")
    told = json.loads(out)
    assert told["ok"] is False
    assert "cannot reach a server" in told["reasons"][0]
