from __future__ import annotations

import gzip
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.nix.real import ChrootStore, environment

SHARED = Path(os.environ.get("HEADRACE_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture
def shared_data() -> Path:
    """The folder of real derivation graphs."""
    if not SHARED.is_dir():
        pytest.skip(f"no real graphs at {SHARED}; HEADRACE_SHARED_DATA may name their folder")
    return SHARED


@pytest.fixture
def expand(shared_data: Path) -> ModuleType:
    """The script that writes a compact graph in each layout of Nix."""
    spec = importlib.util.spec_from_file_location("expand", shared_data / "expand.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def unpack(shared_data: Path):
    def read(name: str) -> bytes:
        return gzip.decompress((shared_data / name).read_bytes())

    return read


@pytest.fixture
def nix_env(tmp_path: Path) -> dict[str, str]:
    """For Nix programs of this test."""
    return environment(tmp_path)


@pytest.fixture
def chroot(tmp_path: Path, nix_env: dict[str, str]) -> Callable[[str], ChrootStore]:
    """Makes stores by name."""
    return lambda name: ChrootStore(tmp_path / name, nix_env)
