"""What a farm has built beside what plain Nix makes of the same derivations."""

from __future__ import annotations

from tests.nix.real import ChrootStore
from tests.processes.conftest import FarmOfProcesses


def assert_equal_to_plain(farm: FarmOfProcesses, plain: ChrootStore, drv_paths: list[str]) -> None:
    """Everything below was built once by somebody, and is what plain Nix builds."""
    plain.run("nix-store", "--realise", "-j2", *drv_paths, seconds=300)
    closure = plain.run("nix-store", "-qR", *drv_paths).stdout.split()
    drvs = [path for path in closure if path.endswith(".drv")]
    expected = {}
    for drv in drvs:
        for output in plain.derivation(drv).outputs.values():
            expected[output.path] = plain.path(output.path)
    hashes = dict(farm.rows("select path, nar_hash from store_path where nar_hash is not null"))
    assert hashes.keys() == expected.keys()
    told = plain.run("nix-store", "-q", "--hash", *hashes).stdout.split()
    assert list(hashes.values()) == told
    completed = (
        "select count(*) from dispatched_job d join job j on j.id = d.job "
        "where j.kind = 'build' and d.outcome = 'Completed'"
    )
    assert farm.rows(completed) == [(len(drvs),)]
