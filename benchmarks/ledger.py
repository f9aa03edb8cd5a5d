"""What a claim, a result and a start cost beside many finished jobs, and forgetting them.

    python benchmarks/ledger.py [--finished 1000,100000,1000000] [--folder DIR] [--json FILE]

Method. A ledger is filled by plain SQL with so many builds that have ended, each with a body, an
edge, a claim and a metric, as a farm leaves them. Beside them 2 000 jobs are submitted and taken
through the ledger's own calls, one transaction each as on the loop of a quiet server: claim (the
row goes in, the job becomes `Building`), result (the row is closed, the job is `Completed`, its
metric is kept). Nothing is synced, as on the loop. `load` is what a starting server reads; `forget`
deletes the oldest jobs in transactions of 100, as `--keep-finished` does.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import quantiles, timed

from actors.ledger.prune import FORGOTTEN
from actors.ledger.records import (
    AddMetric,
    Admission,
    ClaimRecord,
    CloseClaim,
    JobRecord,
    OpenClaim,
    SetJob,
)
from actors.ledger.sqlite import SqliteLedger

CYCLES, FORGETS = 2_000, 50
DAY_SECS = 86_400.0
PAYLOAD = b"\xa0" * 300


def fill(path: Path, finished: int, now: float) -> None:
    """Jobs `old0` ... that ended up to 60 days ago, the oldest first."""
    db = sqlite3.connect(path)
    seqs = range(1, finished + 1)
    ended = [now - 60 * DAY_SECS * (1 - seq / (finished + 1)) for seq in seqs]
    db.execute("INSERT INTO project VALUES ('default', 0.0) ON CONFLICT DO NOTHING")
    db.execute("INSERT INTO submission VALUES (1, 'old', 1, 'accepted', 0.0, 0.0)")
    rows = {
        "drv (seq, path)": ((s, f"/nix/store/{s:032d}-old{s}.drv") for s in seqs),
        "job (seq, id, kind, project, name, status, drv_path, submission, prioritized, interactive,"
        " attempts, losses, created_at, ready_at, ended_at, changed_at, changed_by)": (
            (s, f"j0000-{s:08x}", "build", "default", f"old{s % 5000}", "Completed",
             f"/nix/store/{s:032d}-old{s}.drv", 1, 0, 0, 1, 0, at, at, at, at, 1)
            for s, at in zip(seqs, ended, strict=True)
        ),
        "job_body (job, outputs, payload)": (
            (s, f'["/nix/store/{s:032d}-old{s}"]', PAYLOAD) for s in seqs
        ),
        "requester (submission, job)": ((1, s) for s in seqs),
        "dependency (job, needs)": ((s, s - 1) for s in seqs[1:]),
        "dependent (needs, job)": ((s - 1, s) for s in seqs[1:]),
        "dispatched_job (id, job, worker, session, server, claimed_at, closed_at, outcome)": (
            (f"a0000-{s:08x}", f"j0000-{s:08x}", "w", "c", "bench", at, at, "Completed")
            for s, at in zip(seqs, ended, strict=True)
        ),
        "build_metric (assignment, package, system, at, wall_time_ms, oom, contention)": (
            (f"a0000-{s:08x}", f"old{s % 5000}", "x86_64-linux", at, 1000, 0, 1.0)
            for s, at in zip(seqs, ended, strict=True)
        ),
    }  # fmt: skip
    for table, values in rows.items():
        marks = ",".join("?" * (table.count(",") + 1))
        db.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
    db.commit()
    db.close()


def measure(folder: Path, finished: int) -> dict[str, Any]:
    """One size of ledger."""
    path, now = folder / f"ledger-{finished}.sqlite3", time.time()
    SqliteLedger.open(path, "bench").close()
    filling = timed(lambda: fill(path, finished, now))
    ledger = SqliteLedger.open(path, "bench")
    names = [f"j1111-{n:08x}" for n in range(CYCLES)]
    jobs = tuple(
        JobRecord(
            job_id=name, kind="build", project="default", name=name, status="Created",
            drv_path=f"/nix/store/{name}.drv", outputs=(f"/nix/store/{name}",), payload=PAYLOAD,
            inputs=(),
        )
        for name in names
    )  # fmt: skip
    ledger.admit(Admission("new", jobs), 0.0)
    ledger.apply([SetJob(name, "Queued", now, 0, 0, ready_at=now) for name in names], 0.0, 5.0)
    claims, results = [], []
    for number, name in enumerate(names):
        key = f"a1111-{number:08x}"
        claim = OpenClaim(ClaimRecord(key, name, "w", "c", "bench", now))
        claims.append(1e6 * timed(lambda claim=claim: ledger.apply([claim], 0.0, 5.0)))
        ends = [
            CloseClaim(name, key, now, "Completed"),
            SetJob(name, "Completed", now, 1, 0, ready_at=now),
            AddMetric(key, "old7", "x86_64-linux", now, 1, 1, 1, 1, False, 1.0, 1.0),
        ]
        results.append(1e6 * timed(lambda ends=ends: ledger.apply(ends, 0.0, 5.0)))
    loading = timed(lambda: ledger.load(0.0))
    before = now - 30 * DAY_SECS
    old, _ = ledger.old_jobs(before, 0)
    forgets = [
        timed(lambda some=old[start : start + FORGOTTEN]: ledger.forget(some, before))
        for start in range(0, min(len(old), FORGETS * FORGOTTEN), FORGOTTEN)
    ]
    measured = {
        "finished": finished,
        "megabytes": path.stat().st_size / 2**20,
        "fill_secs": filling,
        "claim": quantiles(claims),
        "result": quantiles(results),
        "load_secs": loading,
        "forget_100_p50_ms": statistics.median(forgets) * 1e3 if forgets else None,
        "forget_100_max_ms": max(forgets) * 1e3 if forgets else None,
    }
    ledger.close()
    path.unlink()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--finished", default="1000,100000,1000000")
    parser.add_argument("--folder", type=Path, help="where the ledgers are made")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    measured = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for finished in map(int, args.finished.split(",")):
            measured.append(measure(Path(folder), finished))
            print(json.dumps(measured[-1]), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
