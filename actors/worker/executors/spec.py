"""What a job says of its builder, and the environment that the builder sees."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from actors.worker.executors.store import BadStorePath, Relocation
from transport import messages as m

MARK = "HEADRACE_BUILDS"
"""A variable of every builder: the directory of the worker that started it."""

_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin:/run/current-system/sw/bin"


class BadSpec(ValueError):
    """The job cannot be run by this executor; the text is one line."""


class BuildSpec(Struct, frozen=True):
    """What the `derivation` map of a job says."""

    builder: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    input_drvs: list[str] = []
    input_srcs: list[str] = []


def build_spec(job: m.BuildJob) -> BuildSpec:
    """Raises `BadSpec`."""
    given = {key: value for key, value in (job.derivation or {}).items() if value is not None}
    try:
        return msgspec.convert(given, BuildSpec)
    except msgspec.ValidationError as error:
        raise BadSpec(f"the job's derivation cannot be read: {error}") from None


def read_spec(job: m.BuildJob, relocate: Relocation) -> BuildSpec:
    """Raises `BadSpec` for a job that has no builder of its own, or outputs elsewhere."""
    spec = build_spec(job)
    try:
        for path in job.outputs.values():
            relocate.check(path)
    except BadStorePath as error:
        raise BadSpec(str(error)) from None
    if not spec.builder:
        raise BadSpec("the job names no builder; only a worker with --executor nix can build it")
    if spec.builder.startswith("builtin:"):
        raise BadSpec(f"the builder {spec.builder} is part of Nix; it needs --executor nix")
    if not job.outputs:
        raise BadSpec("the job names no outputs")
    return spec


def expected_inputs(job: m.BuildJob, spec: BuildSpec) -> list[str]:
    """The required paths that other derivations build: all that are not sources."""
    if not spec.input_drvs:
        return []
    sources = set(spec.input_srcs)
    return [required.path for required in job.required_paths if required.path not in sources]


def environment(
    job: m.BuildJob, spec: BuildSpec, relocate: Relocation, directory: Path, mark: Path
) -> dict[str, str]:
    """The builder's variables, as Nix sets them. Writes the files that `passAsFile` asks for."""
    top = str(directory)
    env = {
        "PATH": _DEFAULT_PATH,
        "HOME": "/homeless-shelter",
        "NIX_STORE": relocate(relocate.prefix),
        "NIX_BUILD_CORES": str(os.cpu_count() or 1),
    }
    env |= {name: relocate(path) for name, path in job.outputs.items()}
    env |= _pass_as_files({n: relocate(v) for n, v in spec.env.items()}, directory)
    env |= dict.fromkeys(("NIX_BUILD_TOP", "TMPDIR", "TEMPDIR", "TMP", "TEMP", "PWD"), top)
    return env | {"NIX_LOG_FD": "2", "TERM": "xterm-256color", MARK: str(mark)}


def _pass_as_files(env: Mapping[str, str], directory: Path) -> dict[str, str]:
    names = set(env.get("passAsFile", "").split())
    passed = {}
    for name, value in env.items():
        if name in names:
            file = directory / f".attr-{hashlib.sha256(name.encode()).hexdigest()}"
            file.write_text(value)
            passed[f"{name}Path"] = str(file)
        else:
            passed[name] = value
    return passed
