"""`headrace health`."""

from __future__ import annotations

import json

import pytest

from bin.health import ailments
from transport import messages as m

WELL = {"actors": {"pager": {"restarts": 3, "queue": 1, "up": True}}, "is_stopping": False,
        "ledger_refuses_writes": False}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, []),
        ({"actors": {"pager": {"up": False}, "ledger": {"up": True}}}, ["actor pager is down"]),
        ({"ledger_refuses_writes": True}, ["the ledger refuses writes: see the server's log"]),
        ({"is_stopping": True}, ["the server is stopping"]),
    ],
)
def test_what_is_wrong_is_named(server, headrace, change, wrong) -> None:
    status = {"server": WELL | change}
    assert ailments(status["server"]) == wrong
    server.on(m.CmdStatus, m.CmdStatusReply(request=0, status=status))
    code, out, err = headrace("health")
    assert (code, out, err) == (int(bool(wrong)), ("; ".join(wrong) or "ok") + "\n", "")
    code, out, _ = headrace("health", "--json")
    assert (code, json.loads(out)) == (int(bool(wrong)), {"ok": not wrong, "reasons": wrong})
