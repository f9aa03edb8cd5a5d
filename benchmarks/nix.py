"""Trivial derivations: headrace beside plain Nix and Nix's own remote builders, in one run.

    apt-get install nix-bin openssh-server
    python benchmarks/nix.py [--counts 200,1000] [--only plain,shared] [--json FILE]

Method. Every machine here is a directory that a mount namespace of its own shows as /nix, made anew
for each measurement; all of them run on this machine, without Nix's sandbox and build users. The
derivations are instantiated beforehand; each writes one line with /bin/sh. What is timed is one
command, from its start until it has returned with all outputs built, and whether they are valid is
checked afterwards. Two builds run at a time in every row:

- plain: `nix-store --realise -j2` on one machine.
- ssh: `nix-store --realise -j0` on a machine with two builders of one slot, through an sshd of our
  own on 127.0.0.1; the outputs come back to the machine.
- shared: `headrace submit --wait`; a server and two workers of one slot that have one store.
- cache: the same with a store for each worker and a binary cache (`file://`) between them, to which
  every output is copied.
- hook: `nix-store --realise -j0` on a machine with `headrace-hook` as its build hook and a farm as
  in the row above; the outputs come back to the machine.

Shapes: wide (N derivations without dependencies), chains (10 of N/10, each derivation reads the one
before) and sleep (20 builds of one second). `--at-most ssh=200` leaves larger shapes out for a row.
A row that cannot be measured is left out, with the reason. Ratios are what can be compared between
machines.
"""

from __future__ import annotations

import argparse
import getpass
import grp
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS = ("plain", "ssh", "shared", "cache", "hook")
SYSTEM = f"{os.uname().machine}-linux"
CHAINS = 10
HEADRACE = [sys.executable, "-m", "bin"]
ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECS = 3600

GOALS = {("wide 1000", "plain"): 0.3, ("wide 1000", "ssh"): 0.05}
"""What headrace with one store is to take at most, as a part of another row."""
SLEEP_GOAL_SECS = 10.8

POLICY = "simple"

CONFIG = """
experimental-features = nix-command
substituters =
sandbox = false
"""
NO_USERS = "build-users-group =\n"

EXPRESSION = """
let
  drv = name: script: previous: derivation {
    inherit name previous;
    system = builtins.currentSystem;
    builder = "/bin/sh";
    args = [ "-c" script ];
  };
  range = n: builtins.genList (i: i) n;
  trivial = name: drv name "echo hi > $out";
  chain = length: name: builtins.foldl'
    (made: n: [ (trivial "${name}-${toString n}" (builtins.head made)) ] ++ made)
    [ (trivial "${name}-first" "") ]
    (range (length - 1));
in {
  wide = count: map (n: trivial "wide-${toString n}" "") (range count);
  chains = count:
    builtins.concatMap (n: chain (count / CHAINS) "chain-${toString n}") (range CHAINS);
  sleep = count: map (n: drv "sleep-${toString n}" "SLEEP 1; echo hi > $out" "") (range count);
}
"""


class Missing(Exception):
    """A row cannot be measured here; the text says why."""


@dataclass(frozen=True)
class Shape:
    """Derivations of a measurement."""

    kind: str
    count: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.count}"

    @property
    def expression(self) -> str:
        text = EXPRESSION.replace("CHAINS", str(CHAINS))
        return (
            f"({text.replace('SLEEP', shutil.which('sleep') or 'sleep')}).{self.kind} {self.count}"
        )


# -- machines --------------------------------------------------------------------------------------


class Machine:
    """A directory that its programs see as /nix."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / name
        (self.folder / "nix").mkdir(parents=True)
        home = self.folder / "home"
        home.mkdir()
        config, pool = CONFIG, ""
        if has_build_users():
            # Machines in namespaces must share the locks of the users: Nix ends all processes of a
            # user before and after a build of its own.
            USER_POOL.mkdir(parents=True, exist_ok=True)
            (self.folder / "nix/var/nix/userpool").mkdir(parents=True)
            pool = f" && mount --bind {USER_POOL} {self.folder}/nix/var/nix/userpool"
        else:
            config += NO_USERS
        environment = {"NIX_CONFIG": config, "HOME": str(home), "NIX_REMOTE": "local"}
        exports = "".join(f"export {name}='{value}'\n" for name, value in environment.items())
        # A script, for sshd runs it, too.
        self.enter = self.folder / "enter"
        self.enter.write_text(
            f"#!/bin/sh\n{exports}exec {' '.join(_UNSHARE)} -- /bin/sh -c '\n"
            f'true{pool} && mount --rbind {self.folder}/nix /nix && exec "$0" "$@"\' "$@"\n'
        )
        self.enter.chmod(0o755)
        self.run("nix-store", "--init")

    def command(self, *command: str) -> list[str]:
        return [str(self.enter), *command]

    def run(self, *command: str, **environment: str) -> str:
        """A command's output; raises `RuntimeError`."""
        done = subprocess.run(
            self.command(*command), env={**os.environ, **environment}, cwd=ROOT,
            capture_output=True, text=True, check=False, timeout=PATIENCE_SECS,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def program(self, name: str) -> Path:
        """A script that runs a program on this machine."""
        path = self.folder / f"run-{name}"
        path.write_text(f'#!/bin/sh\nexec {self.enter} {name} "$@"\n')
        path.chmod(0o755)
        return path

    def instantiate(self, shape: Shape) -> list[str]:
        return self.run("nix-instantiate", "-E", shape.expression).split()

    def valid(self, paths: list[str]) -> set[str]:
        invalid = self.run("nix-store", "--check-validity", "--print-invalid", *paths).split()
        return set(paths) - set(invalid)


def has_build_users() -> bool:
    """Whether Nix builds as users of their own here, which is its default for root."""
    try:
        return os.getuid() == 0 and bool(grp.getgrnam("nixbld").gr_mem)
    except KeyError:
        return False


USER_POOL = Path("/nix/var/nix/userpool")
_UNSHARE = ["unshare", "--mount", "--propagation", "private"]
if os.getuid():
    _UNSHARE.append("--map-root-user")


def outputs(machine: Machine, drvs: list[str]) -> list[str]:
    return machine.run("nix-store", "-q", "--outputs", *drvs).split()


# -- processes -------------------------------------------------------------------------------------


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own group, until the block ends."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until(check: Callable[[], object], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while not check():
        if process.poll() is not None or time.monotonic() > deadline:
            raise Missing(f"{process.args!r} did not start: {log.read_text()[-500:]}")
        time.sleep(0.02)


@contextmanager
def sshd(folder: Path) -> Iterator[tuple[int, Path]]:
    """An sshd of our own: its port, and the key that it lets in. Raises `Missing`."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if program is None or shutil.which("ssh") is None:
        raise Missing("no sshd: apt-get install openssh-server")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    host_key, key = folder / "host_key", folder / "key"
    for file in (host_key, key):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    settings = folder / "sshd_config"
    settings.write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {host_key}\nAuthorizedKeysFile {key}.pub\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\n"
    )
    log = folder / "sshd.log"

    def is_open() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with running([program, "-D", "-e", "-f", str(settings)], log) as process:
        until(is_open, process, log)
        yield port, key


@contextmanager
def farm(folder: Path, workers: list[Machine], *options: str) -> Iterator[str]:
    """A server and a worker of one slot on each machine; yields the endpoint."""
    ready, log = folder / "ready.json", folder / "server.log"
    with ExitStack() as stack:
        server = [*HEADRACE, "server", "--listen", "tcp://127.0.0.1:0", "--policy", POLICY]
        server += ["--state-dir", str(folder / "state"), "--ready-file", str(ready)]
        process = stack.enter_context(running(server, log))
        until(lambda: ready.exists() and ready.stat().st_size, process, log)
        endpoint: str = json.loads(ready.read_text())["endpoint"]
        for number, machine in enumerate(workers):
            name = f"w{number}"
            worker = [*HEADRACE, "worker", "--server", endpoint, "--executor", "nix", "--id", name]
            worker += ["--state-dir", str(folder / name), "--cpu-core-score", "1", *options]
            stack.enter_context(running(machine.command(*worker), folder / f"{name}.log"))

        def are_connected() -> bool:
            status = [*HEADRACE, "status", "--server", endpoint, "--json"]
            done = subprocess.run(status, cwd=ROOT, capture_output=True, check=True)
            return len(json.loads(done.stdout)["workers"]) == len(workers)

        until(are_connected, process, log)
        yield endpoint


# -- rows ------------------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def checked(shape: Shape, paths: list[str], machines: list[Machine]) -> None:
    """Every output is valid somewhere; raises `RuntimeError`."""
    found = set().union(*(machine.valid(paths) for machine in machines))
    if len(paths) != shape.count or found != set(paths):
        raise RuntimeError(f"{shape.name}: only {len(found)} of {shape.count} outputs were built")


def plain(shape: Shape, folder: Path) -> float:
    machine = Machine(folder, "plain")
    drvs = machine.instantiate(shape)
    took = timed(lambda: machine.run("nix-store", "--realise", "-j2", *drvs))
    checked(shape, outputs(machine, drvs), [machine])
    return took


def ssh(shape: Shape, folder: Path) -> float:
    builders = [Machine(folder, name) for name in ("b1", "b2")]
    machine = Machine(folder, "client")
    drvs = machine.instantiate(shape)
    with sshd(folder) as (port, key):
        options = f"-F /dev/null -p {port} -o StrictHostKeyChecking=no -o BatchMode=yes"
        options += f" -o UserKnownHostsFile={folder}/known_hosts"
        lines = "; ".join(
            f"ssh://{getpass.getuser()}@127.0.0.1?remote-program={builder.program('nix-store')}"
            f" {SYSTEM} {key} 1 1"
            for builder in builders
        )
        realise = ["nix-store", "--realise", "-j0", "--option", "builders", lines, *drvs]
        took = timed(lambda: machine.run(*realise, NIX_SSHOPTS=options))
    checked(shape, outputs(machine, drvs), [machine])
    return took


def _submitted(shape: Shape, folder: Path, workers: list[Machine], *options: str) -> float:
    drvs = workers[0].instantiate(shape)
    graph = folder / "graph.json"
    graph.write_text(workers[0].run("nix", "show-derivation", "-r", *drvs))
    with farm(folder, workers, *options) as endpoint:
        submit = [*HEADRACE, "submit", "--wait", "--server", endpoint, str(graph)]
        took = timed(lambda: subprocess.run(submit, cwd=ROOT, check=True, capture_output=True))
    checked(shape, outputs(workers[0], drvs), workers)
    return took


def shared(shape: Shape, folder: Path) -> float:
    machine = Machine(folder, "shared")
    return _submitted(shape, folder, [machine, machine])


def cache(shape: Shape, folder: Path) -> float:
    workers = [Machine(folder, name) for name in ("w1", "w2")]
    return _submitted(shape, folder, workers, "--cache", f"file://{folder}/cache")


def hook(shape: Shape, folder: Path) -> float:
    program = Path(sys.executable).with_name("headrace-hook")
    if not program.exists():
        raise Missing(f"no {program}: pip install headrace in this environment")
    workers = [Machine(folder, name) for name in ("w1", "w2")]
    machine = Machine(folder, "client")
    drvs = machine.instantiate(shape)
    uri = f"file://{folder}/cache"
    with farm(folder, workers, "--cache", uri) as endpoint:
        realise = ["nix-store", "--realise", "-j0", "--option", "build-hook", str(program), *drvs]
        took = timed(lambda: machine.run(*realise, HEADRACE_SERVER=endpoint, HEADRACE_CACHE=uri))
    checked(shape, outputs(machine, drvs), [machine])
    return took


MEASURES: dict[str, Callable[[Shape, Path], float]] = {
    "plain": plain, "ssh": ssh, "shared": shared, "cache": cache, "hook": hook,
}  # fmt: skip


# -- the run ---------------------------------------------------------------------------------------


def measure(shape: Shape, rows: list[str], at_most: dict[str, int]) -> dict[str, float]:
    """Seconds by row; rows that cannot be had are named on standard error."""
    seconds = {}
    for row in rows:
        if shape.count > at_most.get(row, shape.count):
            continue
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
            try:
                seconds[row] = round(MEASURES[row](shape, Path(folder)), 2)
            except Missing as why:
                print(f"{row} left out of {shape.name}: {why}", file=sys.stderr)
            finally:
                # Outputs are read-only directories at times.
                subprocess.run(["chmod", "-R", "u+w", folder], check=True)
    return seconds


def told(shape: Shape, seconds: dict[str, float]) -> Iterator[str]:
    """The lines of a measurement: seconds, ms for each derivation, and what headrace takes."""
    ours = seconds.get("shared")
    for row, took in seconds.items():
        ratio = "" if ours is None or row == "shared" else f"{ours / took:>14.3f}"
        if (goal := GOALS.get((shape.name, row))) and ours is not None:
            ratio += f"   goal {goal}: {'met' if ours / took <= goal else 'missed'}"
        if shape.kind == "sleep" and row == "shared":
            verdict = "met" if took <= SLEEP_GOAL_SECS else "missed"
            ratio = f"{'':>14}   goal {SLEEP_GOAL_SECS} s: {verdict}"
        each = took / shape.count * 1000
        yield f"{shape.name:<12} {row:<8} {took:>9.2f} {each:>10.1f} {ratio}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", default="200,1000", help="numbers of trivial derivations")
    parser.add_argument("--only", default=",".join(ROWS), help="rows, in the order given")
    parser.add_argument("--shapes", default="wide,chains,sleep", help="shapes to measure")
    parser.add_argument("--at-most", action="append", default=[], metavar="ROW=COUNT",
                        help="leave larger shapes out for a row")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    for program, package in (("nix-store", "nix-bin"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            print(f"{program} is not on PATH: apt-get install {package}", file=sys.stderr)
            return 1
    rows, kinds = args.only.split(","), args.shapes.split(",")
    if unknown := sorted(set(rows) - set(ROWS)):
        parser.error(f"unknown row {unknown[0]!r}; known are {', '.join(ROWS)}")
    at_most = {
        row: int(count) for row, _, count in (given.partition("=") for given in args.at_most)
    }
    shapes = [
        Shape(kind, count)
        for count in map(int, args.counts.split(","))
        for kind in ("wide", "chains")
        if kind in kinds
    ]
    shapes += [Shape("sleep", 20)] if "sleep" in kinds else []
    print(f"{'shape':<12} {'row':<8} {'seconds':>9} {'ms each':>10} {'shared / row':>14}")
    figures: dict[str, Any] = {}
    for shape in shapes:
        figures[shape.name] = seconds = measure(shape, rows, at_most)
        for line in told(shape, seconds):
            print(line, flush=True)
    if args.json:
        versions = subprocess.run(["nix", "--version"], capture_output=True, text=True, check=True)
        about = {"cores": os.cpu_count(), "nix": versions.stdout.split()[-1], "seconds": figures}
        args.json.write_text(json.dumps(about, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
