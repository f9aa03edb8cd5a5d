"""The real Nix in tests: stores of their own, derivations, and the jobs that they are."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from actors.nix import aterm
from transport import messages as m

BUSYBOX = "/bin/busybox"

needs_nix = pytest.mark.skipif(
    shutil.which("nix-store") is None or not Path(BUSYBOX).exists(),
    reason="needs Nix and a static busybox: apt-get install nix-bin busybox-static",
)

CONFIG = f"""
experimental-features = nix-command
substituters =
sandbox-paths = /bin/sh={BUSYBOX}
"""
"""Chroot stores build in a sandbox, where nothing but /bin/sh is; its commands are busybox's."""


def environment(folder: Path) -> dict[str, str]:
    """For Nix programs: nothing of the user's own, no cache on the internet."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    return {**os.environ, "HOME": str(home), "NIX_CONFIG": CONFIG}


class ChrootStore:
    """A store whose files are below a folder; its paths still start with /nix/store."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.uri = str(folder)
        self._env = dict(env)

    def run(
        self, *command: str, check: bool = True, bare: bool = False, seconds: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """A Nix program on this store, if it takes one."""
        store = [] if bare else ["--store", self.uri]
        return subprocess.run(
            [*command, *store],
            env=self._env, text=True, capture_output=True, check=check, timeout=seconds,
        )  # fmt: skip

    def instantiate(self, expression: str) -> str:
        """The drv path of a Nix expression."""
        said = self.run("nix-instantiate", "-E", expression).stdout.split()[-1]
        return said.partition("!")[0]

    def path(self, store_path: str) -> Path:
        return self.folder / store_path[1:]

    def read(self, store_path: str) -> str:
        return self.path(store_path).read_text()

    def derivation(self, drv_path: str) -> aterm.StoreDerivation:
        return aterm.parse(self.path(drv_path).read_bytes())

    def is_valid(self, store_path: str) -> bool:
        return self.run("nix-store", "--check-validity", store_path, check=False).returncode == 0

    def delete(self, *store_paths: str) -> None:
        self.run("nix-store", "--delete", "--ignore-liveness", *store_paths)

    def job(self, drv_path: str, *, timeout: int = 0, silent: int = 0) -> m.BuildJob:
        """The job that a server would send for it."""
        drv = self.derivation(drv_path)
        inputs = {path: self.derivation(path) for path in drv.input_drvs}
        required = [o.path for needed in inputs.values() for o in needed.outputs.values()]
        features = drv.env.get("requiredSystemFeatures", "").split()
        return m.BuildJob(
            project="default",
            drv_path=drv_path,
            name=drv.env.get("name", "job"),
            outputs={name: output.path for name, output in drv.outputs.items()},
            requirement=m.Requirement(drv.system, features),
            required_paths=[m.RequiredPath(path) for path in [*required, *drv.input_srcs]],
            timeout_secs=timeout,
            max_silent_secs=silent,
            derivation={
                "builder": drv.builder, "args": drv.args, "env": drv.env,
                "input_drvs": list(drv.input_drvs), "input_srcs": drv.input_srcs,
            },
        )  # fmt: skip


def build(name: str, script: str, attributes: str = "") -> str:
    """The Nix expression of a derivation that runs a script; `attributes` are more of its own."""
    text = script.replace("''", "'''")
    return (
        f'derivation {{ name = "{name}"; system = builtins.currentSystem; builder = "/bin/sh"; '
        f"args = [ \"-c\" ''{text}'' ]; {attributes} }}"
    )
