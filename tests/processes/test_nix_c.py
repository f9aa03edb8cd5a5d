"""A real C project, built by two workers that share nothing but a cache, and by plain Nix."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.nix.real import ChrootStore, environment, needs_nix
from tests.processes.beside_nix import assert_equal_to_plain
from tests.processes.conftest import HEADRACE, until

PROJECT = Path(__file__).parents[1] / "nix" / "c_project"

pytestmark = [
    needs_nix,
    pytest.mark.processes,
    pytest.mark.skipif(
        shutil.which("gcc") is None or not Path("/usr/include/stdio.h").exists(),
        reason="needs a C compiler: apt-get install gcc libc6-dev",
    ),
]


@pytest.fixture
def c_farm(farm, tmp_path, monkeypatch):
    """A server and two workers, one build at a time each."""
    env = environment(tmp_path)
    env["NIX_CONFIG"] += "extra-sandbox-paths = /usr /lib /lib64\n"
    for name in ("HOME", "NIX_CONFIG"):
        monkeypatch.setenv(name, env[name])
    farm.server("--reconnect-grace", "1")
    farm.cache = f"file://{tmp_path}/cache?compression=none"
    farm.by_name = {
        name: farm.nix_worker(name, "--cache", farm.cache, slots=1) for name in ("w1", "w2")
    }
    farm.plain = ChrootStore(tmp_path / "plain", env)
    return farm


def started(farm, attribute: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*HEADRACE, "build", str(PROJECT), "-A", attribute, "--server", farm.endpoint],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def assert_built(farm, attribute: str) -> str:
    """Builds on the farm and with plain Nix, which agree; the output path."""
    built = farm.run("build", str(PROJECT), "-A", attribute)
    assert built.returncode == 0, built.stderr
    plain = farm.plain.run("nix-build", "-j2", str(PROJECT), "-A", attribute, "--no-out-link")
    assert built.stdout == plain.stdout
    drv = farm.plain.run("nix-instantiate", str(PROJECT), "-A", attribute).stdout.strip()
    assert_equal_to_plain(farm, farm.plain, [drv])
    return plain.stdout.strip()


def test_a_c_project_is_built_as_plain_nix_builds_it(c_farm, tmp_path):
    out = assert_built(c_farm, "check")
    fetched = ChrootStore(tmp_path / "user", c_farm.plain._env)
    fetched.run("nix", "copy", "--no-check-sigs", "--from", c_farm.cache, out, "--to", fetched.uri,
                bare=True)  # fmt: skip
    assert fetched.read(out) == "Hello, Nix. Bye, Nix.\n"
    # The programs were built side by side, with a library that one of the two had made.
    assert {worker for (worker,) in c_farm.rows("select worker from dispatched_job")} == {
        "w1",
        "w2",
    }


def test_a_worker_that_is_killed_while_it_builds_leaves_its_work_to_the_other(c_farm):
    def builders() -> dict[str, str]:
        jobs = c_farm.jobs()
        return {
            name: jobs[name]["worker"]
            for name in ("hello", "bye")
            if name in jobs and jobs[name]["status"] == "Building"
        }

    with started(c_farm, "slowly.check") as building:
        both = until(lambda: len(now := builders()) == 2 and now, "both programs are built")
        victim = both["hello"]
        c_farm.by_name[victim].send_signal(signal.SIGKILL)
        c_farm.by_name[victim].wait(timeout=10)
        _, said = building.communicate(timeout=60)
    assert building.returncode == 0, said
    assert_built(c_farm, "slowly.check")
    (other,) = {"w1", "w2"} - {victim}
    jobs = c_farm.jobs()
    assert {jobs[name]["worker"] for name in ("hello", "bye", "check")} == {other}
