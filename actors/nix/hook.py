"""Nix's build-hook protocol, and what a farm answers to it.

Nix starts a program for the first derivation to be built, writes its settings and then one request
after the other to its standard input, and reads an answer a line from its standard error. A program
whose answer was `accept` gets the inputs and the wanted outputs, and belongs to that build from
then on; its exit code is the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from actors.nix import wire
from actors.nix.settings import plain
from actors.nix.wire import BadFrame, Reply, Writer
from transport import messages as m

Answer = Literal["accept", "decline", "decline-permanently", "postpone"]

EXIT_MISC, EXIT_FAILED, EXIT_TIMED_OUT = 1, 100, 101
MAX_SETTINGS = 10_000
QUEUED_BUILDS = 64
"""Of one machine, beyond those that could run at once: work until Nix asks again after 5 s."""
WARNING = 1


class Request(Struct, frozen=True):
    """Nix asks whether a derivation is to be built elsewhere."""

    am_willing: bool
    """Nix has a free slot of its own."""
    system: str
    drv_path: str
    features: frozenset[str]


class Accepted(Struct, frozen=True):
    """What follows an acceptance."""

    inputs: list[str]
    """All that the build needs, with all that refers to."""
    wanted: list[str]
    """Names of the outputs that are missing."""


def settings() -> Reply[dict[str, str]]:
    """Nix's settings, first of all."""
    found: dict[str, str] = {}
    while (yield from wire.integer()):
        name = yield from wire.string()
        found[name] = yield from wire.string()
        if len(found) > MAX_SETTINGS:
            raise BadFrame("too many settings")
    return found


def request() -> Reply[Request]:
    """One request; the input ends where there is none."""
    word = yield from wire.string()
    if word != "try":
        raise BadFrame(f"an unknown request: {word!r}")
    am_willing = yield from wire.boolean()
    system = yield from wire.string()
    drv_path = yield from wire.string()
    return Request(am_willing, system, drv_path, frozenset((yield from wire.strings())))


def accepted() -> Reply[Accepted]:
    inputs = yield from wire.strings()
    return Accepted(inputs, (yield from wire.strings()))


def decide(asked: Request, workers: Iterable[Mapping[str, Any]]) -> Answer:
    """What a farm with these workers (of its status) says. It queues better than Nix, which asks
    again every 5 s: what some worker could build is accepted, however busy all are. What Nix
    itself fetches is left to it while it has a slot."""
    if asked.system == "builtin" and asked.am_willing:
        return "decline"
    return "accept" if any(_is_able(worker, asked) for worker in workers) else "decline"


def room(asked: Request, workers: Iterable[Mapping[str, Any]], most: int) -> int:
    """How many builds one machine may have on the farm at a time, its queue included, `most` at
    most: each costs the machine a process."""
    able = [worker for worker in workers if _is_able(worker, asked)]
    slots: int = sum(worker["slots"]["build"]["max"] for worker in able)
    return min(most, slots + QUEUED_BUILDS)


def _is_able(worker: Mapping[str, Any], asked: Request) -> bool:
    return bool(
        worker["state"] == "active"
        and worker["capabilities"]["build"]
        and (asked.system == "builtin" or asked.system in worker["architectures"])
        and asked.features <= set(worker["system_features"])
    )


def event(text: str) -> bytes:
    """A line for people. Of a hook that has accepted Nix shows nothing but such events."""
    return f"@nix {json.dumps({'action': 'msg', 'level': WARNING, 'msg': text})}\n".encode()


def lines(answer: Answer, machine: str = "headrace") -> bytes:
    """The answer as Nix reads it."""
    text = f"# {answer}\n" + (f"{machine}\n" if answer == "accept" else "")
    return text.encode()


def job(
    drv: m.SubmittedJob, inputs: Sequence[str], told: Mapping[str, str], project: str | None
) -> m.SubmittedJob:
    """The build as it is submitted: all it needs is there, so that nothing is waited for."""
    return replace(
        drv,
        project=project,
        input_drvs=[],
        input_srcs=[],
        required_paths=[m.RequiredPath(path) for path in inputs],
        timeout_secs=_seconds(told, "timeout"),
        max_silent_secs=_seconds(told, "max-silent-time"),
    )


def _seconds(told: Mapping[str, str], name: str) -> int:
    value = told.get(name, "0")
    return min(int(value), 2**32 - 1) if value.isdecimal() else 0


def exit_code(status: str) -> int:
    """For a job that has ended."""
    codes = {"Completed": 0, "TimedOut": EXIT_TIMED_OUT, "Aborted": EXIT_MISC}
    return codes.get(status, EXIT_FAILED)


# -- importing the outputs -------------------------------------------------------------------------


def import_request(
    told: Mapping[str, str], drv: m.SubmittedJob, wanted: Sequence[str], cache: str, slots: int
) -> bytes:
    """What makes Nix's own hook import the outputs of a derivation from a cache.

    Nix holds the locks of the outputs, and only its own hook may import without them. To that one
    the cache is a machine that has built the derivation already. The inputs, which it would copy
    there first, are kept from it.
    """
    features = ",".join(drv.required_features) or "-"
    machine = f"{cache} {drv.system} - {slots} 1 {features} -"
    # What a moment ago was not there is now.
    fresh = {"narinfo-cache-negative-ttl": "0", "narinfo-cache-positive-ttl": "0"}
    written = Writer()
    for name, value in {**told, **fresh, "builders": machine}.items():
        written.integer(1).string(name).string(value)
    written.integer(0)
    written.string("try").boolean(False).string(drv.system).string(drv.drv_path)
    written.strings(drv.required_features).strings([]).strings(wanted)
    return written.done()


def answered(said: bytes) -> tuple[str, str]:
    """From the standard error of Nix's own hook: its answer, and what went wrong on one line."""
    answer, errors = "", []
    for line in said.decode(errors="replace").splitlines():
        if line.startswith("# ") and not answer:
            answer = line[2:]
        elif line.startswith("@nix "):
            errors += _error_of(line[5:])
    return answer, plain(" ".join(errors)).removeprefix("error: ")


def _error_of(text: str) -> list[str]:
    try:
        told = json.loads(text)
        is_error = told["action"] == "msg" and told["level"] == 0
        return [str(told["msg"])] if is_error else []
    except (ValueError, LookupError, TypeError):
        return []
