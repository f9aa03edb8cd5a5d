"""What is built under chaos, and what must come of it: a seed's stream of submissions. Pure.

A build writes its output in several steps, as real builders do, each marked with a number of
that one run: who finds two numbers, or none at the end, knows that two runs met in one output or
that one did not end. In between stands a digest over its own name and the digests of its inputs,
so that every output can be foretold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from random import Random
from typing import Literal

import msgspec
from msgspec import Struct

from actors.graph.storepath import short_hash
from transport.messages import (
    EvalSource,
    SubmittedCluster,
    SubmittedEvaluation,
    SubmittedJob,
    SubmittedMember,
)

_STORE = "/nix/store"
_SCRIPT = """\
set -e
echo "building $name"
head -c "$chatter" /dev/zero | tr '\\0' .
read -r run < /proc/sys/kernel/random/uuid
digest=$({ echo "$name"; for input in $inputs; do sed -n 2p "$input"; done; } | sha256sum)
echo "begin $run" > "$out"
sleep "$seconds"
test -z "$fails" || { echo "this build fails"; exit 7; }
echo "${digest%% *}" >> "$out"
echo "end $run" >> "$out"
"""
FAILURE = "the builder failed with exit code 7"
_CHATTER_BYTES = 300_000
_CLUSTER_TRIES, _CLUSTER_MEMBERS = 1_000, 2
_LENGTHS = (0.05, 0.05, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4, 0.8, 3.0)  # seconds

Ending = Literal["Completed", "Failed", "DependencyFailed"]


class Expected(Struct, frozen=True):
    """What must come of one build."""

    name: str
    ending: Ending
    output: str
    """Its store path."""
    digest: str
    """What the output says, if it completes."""


class Batch(Struct, frozen=True):
    """One submission."""

    name: str
    jobs: list[SubmittedJob]
    evaluations: list[SubmittedEvaluation]
    files: dict[str, bytes]
    """Graph files that the evaluations read; to be there before the submission."""
    builds: dict[str, Expected]
    """By drv path, those that evaluations bring included."""
    endings: dict[str, Ending]
    """Of evaluations, by the name of their graph file."""
    clusters: list[SubmittedCluster] = []
    """With their ids; all must complete. A submission with one may not be sent twice."""


class Workload:
    """Submissions without end; the same seed gives the same ones."""

    def __init__(self, seed: int, system: str, graphs: str, workers: int) -> None:
        """`graphs` is the folder, as workers see it, in which graph files will be."""
        self._seed = seed
        self._system = system
        self._graphs = graphs
        self._random = Random(f"workload/{seed}")  # noqa: S311 - to be repeated
        self._number = 0
        # A further kind of submission is one more entry here.
        self._makers: tuple[Callable[[str], Batch], ...] = (
            self._chain, self._fan, self._failing, self._layers, self._evaluation, self._cluster
        )  # fmt: skip
        if workers < _CLUSTER_MEMBERS:
            self._makers = self._makers[:-1]  # each member needs a worker of its own

    def next_batch(self) -> Batch:
        """The next submission."""
        self._number += 1
        return self._random.choice(self._makers)(f"c{self._seed}-{self._number}")

    # -- kinds of submissions --------------------------------------------------------------

    def _chain(self, name: str) -> Batch:
        graph = _Graph(self._system, name)
        for i in range(self._random.randint(3, 6)):
            graph.add(f"link{i}", self._secs(), [f"link{i - 1}"] if i else [])
        return graph.batch()

    def _fan(self, name: str) -> Batch:
        graph = _Graph(self._system, name)
        leaves = [f"leaf{i}" for i in range(self._random.randint(3, 9))]
        for leaf in leaves:
            graph.add(leaf, self._secs(), chatter=self._random.choice((0, 0, _CHATTER_BYTES)))
        graph.add("top", self._secs(), leaves)
        return graph.batch()

    def _failing(self, name: str) -> Batch:
        graph = _Graph(self._system, name)
        graph.add("fine", self._secs())
        graph.add("bad", self._secs(), ["fine"], fails=True)
        graph.add("after", self._secs(), ["bad", "fine"])
        graph.add("later", self._secs(), ["after"])
        return graph.batch()

    def _layers(self, name: str) -> Batch:
        graph = _Graph(self._system, name)
        above: list[str] = []
        for depth in range(3):
            layer = [f"l{depth}-{i}" for i in range(4)]
            for job in layer:
                graph.add(job, self._secs(), self._random.sample(above, min(2, len(above))))
            above = layer
        return graph.batch()

    def _evaluation(self, name: str) -> Batch:
        fails = self._random.random() < 0.3
        graph = _Graph(self._system, name)
        names = [f"e{i}" for i in range(self._random.randint(4, 10))]
        for i, job in enumerate(names):
            graph.add(job, self._secs(), names[max(0, i - 2) : i : 2])
        if fails:
            graph.add("bad", self._secs(), names[:1], fails=True)
        ref = f"{self._graphs}/{name}.json"
        batch = graph.batch()
        content = json.dumps({"jobs": [msgspec.to_builtins(job) for job in batch.jobs]})
        return Batch(
            name=name,
            jobs=[],
            evaluations=[
                SubmittedEvaluation(source=EvalSource(kind="graph-file", ref=ref), attributes=[])
            ],
            files={f"{name}.json": content.encode()},
            builds=batch.builds,
            endings={ref: "Failed" if fails else "Completed"},
        )

    def _cluster(self, name: str) -> Batch:
        graph = _Graph(self._system, name)
        graph.add("input", self._secs())
        graph.add("server", self._secs(), ["input"])
        graph.add("client", self._secs(), ["input"])
        graph.add("after", self._secs(), ["server", "client"])
        batch = graph.batch()
        members = [
            SubmittedMember(role=job.name.rpartition("-")[2], job=job.drv_path)
            for job in batch.jobs[1:3]
        ]
        cluster = SubmittedCluster(members=members, cluster_id=name, retry_budget=_CLUSTER_TRIES)
        return msgspec.structs.replace(batch, clusters=[cluster])

    def _secs(self) -> float:
        """Most builds are short; some outlast the time that a lost worker keeps them."""
        return self._random.choice(_LENGTHS)


class _Graph:
    """Builds of one submission, inputs first."""

    def __init__(self, system: str, name: str) -> None:
        self._system = system
        self._name = name
        self._jobs: list[SubmittedJob] = []
        self._builds: dict[str, Expected] = {}

    def add(
        self,
        name: str,
        secs: float,
        inputs: list[str] | None = None,
        *,
        fails: bool = False,
        chatter: int = 0,
    ) -> None:
        full = f"{self._name}-{name}"
        needs = [self._builds[self._drv(i)] for i in inputs or ()]
        content = "".join(f"{line}\n" for line in (full, *(need.digest for need in needs)))
        ending: Ending = "Failed" if fails else "Completed"
        if any(need.ending != "Completed" for need in needs):
            ending = "DependencyFailed"
        out = f"{_STORE}/{short_hash(f'headrace-chaos:out:{full}')}-{full}"
        drv = self._drv(name)
        digest = hashlib.sha256(content.encode()).hexdigest()
        self._builds[drv] = Expected(full, ending, out, digest)
        env = {
            "name": full,
            "inputs": " ".join(need.output for need in needs),
            "seconds": str(secs),
            "fails": "yes" if fails else "",
            "chatter": str(chatter),
            "PATH": "/usr/bin:/bin:/run/current-system/sw/bin",
        }
        self._jobs.append(
            SubmittedJob(
                drv_path=drv,
                name=full,
                system=self._system,
                required_features=[],
                outputs={"out": out},
                input_drvs=[self._drv(i) for i in inputs or ()],
                input_srcs=[],
                builder="/bin/sh",
                args=["-c", _SCRIPT],
                env=env,
            )
        )

    def batch(self) -> Batch:
        return Batch(self._name, self._jobs, [], {}, self._builds, {})

    def _drv(self, name: str) -> str:
        full = f"{self._name}-{name}"
        return f"{_STORE}/{short_hash(f'headrace-chaos:drv:{full}')}-{full}.drv"


def is_right(text: str, expected: Expected) -> bool:
    """Whether an output was written whole, by one run of its build, from the right inputs."""
    match text.splitlines():
        case [begin, digest, end]:
            run = begin.removeprefix("begin ")
            whole = begin.startswith("begin ") and end == f"end {run}" and text.endswith("\n")
            return whole and digest == expected.digest
        case _:
            return False
