"""Importing what the farm has built while Nix, which waits for its hook, locks the outputs.

Since 2.29 only Nix's own hook gets past these locks, so that one does it: it is told of a machine,
the cache, that has the outputs already. Older versions do the same, and are treated no differently.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence

from actors.nix import hook as protocol
from actors.nix.hook import EXIT_MISC
from actors.nix.settings import Nix, plain
from bin.errors import CommandError
from transport.messages import SubmittedJob

LOG_FD, LOG_END_FD = 4, 5
"""Nix's pipe of the build log, both ends; its own hook takes them for granted."""
PATIENCE_SECS = 60.0
PAUSE_SECS = 0.2
_WHAT = "import the outputs"


def import_outputs(
    nix: Nix, told: Mapping[str, str], drv: SubmittedJob, wanted: Sequence[str], slots: int
) -> None:
    """Makes the outputs valid in the store. `slots` hooks at most do this at a time.

    Raises `CommandError`.
    """
    assert nix.cache is not None
    env = nix.environment()
    outputs = list(drv.outputs.values())
    if nix.key_file is not None:
        run_nix(nix.check_signatures(outputs, nix.cache), env, _WHAT)
    request = protocol.import_request(told, drv, wanted, nix.cache, slots)
    give_up_at = time.monotonic() + PATIENCE_SECS
    while not _try(request, env):
        if time.monotonic() > give_up_at:
            raise CommandError(f"cannot {_WHAT}: too many hooks of others import", EXIT_MISC)
        time.sleep(PAUSE_SECS)
    if nix.key_file is not None:
        # The cache may have changed since; Nix's hook itself does not check.
        run_nix(nix.check_signatures(outputs, nix.store), env, _WHAT)


def _try(request: bytes, env: Mapping[str, str]) -> bool:
    """False when Nix's hook has no room for it now."""
    done = subprocess.run(
        ["build-remote", "0"], executable="nix", env=env, input=request,  # noqa: S607 - on PATH
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        pass_fds=[fd for fd in (LOG_FD, LOG_END_FD) if _is_open(fd)],
        check=False,
    )  # fmt: skip
    answer, error = protocol.answered(done.stderr)
    if answer == "accept" and not done.returncode:
        return True
    if answer == "postpone":
        return False
    why = error or f"Nix's own hook said {answer!r}, and ended with {done.returncode}"
    raise CommandError(f"cannot {_WHAT}: {why}", EXIT_MISC)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def run_nix(command: Sequence[str], env: Mapping[str, str], what: str) -> None:
    """A Nix program to its end. Raises `CommandError`."""
    done = subprocess.run(  # noqa: S603 - Nix
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode:
        said = plain(done.stderr.decode(errors="replace"))
        raise CommandError(f"cannot {what}: {said}", EXIT_MISC)
