"""How long a worker takes to score a page of offers against a Nix store.

    apt-get install nix-bin busybox-static
    python benchmarks/nix_scoring.py [--paths 10000] [--candidates 1000] [--required 20] [--json F]

Method. A chroot store of `--paths` valid paths (registered with `nix-store --load-db`, each a small
file); a page of `--candidates` builds that need `--required` paths each, drawn at random from twice
as many paths as are valid, so that half are missing, and one output each. Rows, each the median of
several pages drawn anew:

- first page: of a worker that has just started, all it does before included but the start of Nix;
- next pages: other candidates, the store as before;
- after a build: one path more in the store before each page;
- one query: a page asked of `nix-store --serve` alone, with no memory, for comparison.

Every row of the worker has the goal of `python -m benchmarks`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import trio

from actors.nix import serve, wire
from actors.nix.hashes import to_nix32
from actors.nix.settings import Nix
from actors.worker.executors.nix import NixExecutor
from transport import messages as m

GOAL_MS = 30
WORKER_ROWS = ("first page", "next pages", "after a build")
ROWS = (*WORKER_ROWS, "one query")
_ROUNDS = 7


class Missing(Exception):
    """It cannot be measured here; the text says why."""


def store_path(number: int) -> str:
    digest = hashlib.sha256(str(number).encode()).digest()[:20]
    return f"/nix/store/{to_nix32(digest)}-package-{number}"


def fill(folder: Path, env: dict[str, str], numbers: range) -> None:
    """Makes paths valid in the chroot store at `folder`."""
    files = folder / "nix" / "store"
    files.mkdir(parents=True, exist_ok=True)
    lines = []
    nothing = hashlib.sha256(b"").hexdigest()
    for number in numbers:
        path = store_path(number)
        (files / path.rpartition("/")[2]).write_bytes(b"")
        lines += [path, nothing, "120", "", "0"]
    subprocess.run(
        ["nix-store", "--load-db", "--store", str(folder)],
        input="\n".join(lines) + "\n", text=True, env=env, check=True,
    )  # fmt: skip


def page(rng: random.Random, paths: int, candidates: int, required: int) -> list[m.JobCandidate]:
    def drawn() -> str:
        return store_path(rng.randrange(2 * paths))

    return [
        m.JobCandidate(
            job_id=f"j{n}",
            kind="build",
            project="default",
            required_paths=[m.RequiredPath(drawn(), 120) for _ in range(required)],
            drv_paths=[],
            output_paths=[drawn()],
        )
        for n in range(candidates)
    ]


def milliseconds(work: Callable[[], object]) -> float:
    return harness.timed(work) * 1000


def measure(paths: int, candidates: int, required: int, folder: Path) -> dict[str, float]:
    """Milliseconds by row. Raises `Missing`."""
    if shutil.which("nix-store") is None:
        raise Missing("not installed: nix-store (apt-get install nix-bin)")
    env = {
        **os.environ, "HOME": str(folder), "TMPDIR": str(folder),
        "NIX_CONFIG": "experimental-features = nix-command\nsubstituters =",
    }  # fmt: skip
    os.environ.update(env)
    store = folder / "store"
    fill(store, env, range(paths))
    rng = random.Random(1)
    rows: dict[str, list[float]] = {name: [] for name in ROWS}
    executor = None
    for _ in range(_ROUNDS):
        executor = NixExecutor(Nix(str(store)))
        executor.start()
        first = page(rng, paths, candidates, required)
        scores: list[m.Score] = []
        rows["first page"].append(
            milliseconds(lambda e=executor, p=first, s=scores: s.extend(e.score(p)))
        )
        missing = sum(score.missing_count for score in scores) / (candidates * required)
        assert 0.45 < missing < 0.55, f"{missing:.0%} of the paths are missing"
        if len(rows["first page"]) < _ROUNDS:
            trio.run(executor.close)
    for number in range(_ROUNDS):
        more = page(rng, paths, candidates, required)
        rows["next pages"].append(milliseconds(lambda p=more: executor.score(p)))
        fill(store, env, range(2 * paths + number, 2 * paths + number + 1))
        more = page(rng, paths, candidates, required)
        rows["after a build"].append(milliseconds(lambda p=more: executor.score(p)))
    trio.run(executor.close)
    asked = serve.BlockingServe(serve.command(str(store)), env)
    for _ in range(_ROUNDS):
        distinct = {
            p for c in page(rng, paths, candidates, required)
            for p in [*(r.path for r in c.required_paths), *c.output_paths]
        }  # fmt: skip
        request = serve.query_valid_paths(distinct, lock=False, substitute=False)
        rows["one query"].append(milliseconds(lambda r=request: asked.ask(r, wire.strings)))
    asked.close()
    return {name: round(statistics.median(values), 1) for name, values in rows.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paths", type=int, default=10_000, help="valid paths of the store")
    parser.add_argument("--candidates", type=int, default=1_000, help="builds of a page")
    parser.add_argument("--required", type=int, default=20, help="paths that each needs")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        try:
            rows = measure(args.paths, args.candidates, args.required, Path(folder))
        except Missing as missing:
            print(missing, file=sys.stderr)
            return 1
    for name, value in rows.items():
        goal = f"   (goal {GOAL_MS} ms)" if name in WORKER_ROWS else ""
        print(f"{name:<14} {value:>8.1f} ms{goal}")
    if args.json:
        given: dict[str, Any] = {"cores": os.cpu_count(), "paths": args.paths}
        given |= {"candidates": args.candidates, "required": args.required, "ms": rows}
        args.json.write_text(json.dumps(given, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
