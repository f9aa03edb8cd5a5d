"""Ledgers and records for these tests."""

from __future__ import annotations

from pathlib import Path

from actors.ledger.records import Admission, ClaimRecord, JobRecord
from actors.ledger.sqlite import SqliteLedger


def drv(name: str) -> str:
    return f"/nix/store/{name}.drv"


def record(name: str, *needs: str, **more) -> JobRecord:
    fields = {
        "job_id": name, "kind": "build", "project": "default", "name": name,
        "status": "Created", "drv_path": drv(name), "outputs": (f"/nix/store/{name}",),
        "payload": b"\xa0", "inputs": tuple(map(drv, needs)),
    }  # fmt: skip
    return JobRecord(**{**fields, **more})


def admit(ledger: SqliteLedger, *jobs: JobRecord, requester: str = "s1", **more):
    return ledger.admit(Admission(requester=requester, jobs=jobs, **more), 0.0)


def claim(number: int, job: str, worker: str = "w") -> ClaimRecord:
    return ClaimRecord(f"a{number}", job, worker, "session", "server-1", 5.0)


def open_ledger(folder: Path, server: str = "server-1") -> SqliteLedger:
    ledger = SqliteLedger.open(folder / "ledger.sqlite3", server, wall=lambda: 100.0)
    ledger.recover([])
    return ledger
