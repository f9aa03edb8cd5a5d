"""What nix-eval-jobs is given, and its lines."""

from __future__ import annotations

import pytest

from actors.nix import eval_jobs


@pytest.mark.parametrize(
    ("memory_mib", "cores", "count", "each"),
    [(512, 8, 1, 512), (4096, 2, 2, 2048), (65536, 64, 4, 16384), (0, 1, 1, 1)],
)
def test_processes_share_the_memory(memory_mib: int, cores: int, count: int, each: int) -> None:
    assert eval_jobs.processes(memory_mib, cores) == (count, each)


def test_the_search_path_is_handed_on() -> None:
    path = "nixpkgs=https://h/x.tar.gz:/a:b=flake:nixpkgs:channel:x:"
    command = eval_jobs.command("/srv/w1", path, 4096, 2)
    assert command == [
        "nix-eval-jobs", "--option", "store", "/srv/w1",
        "--include", "nixpkgs=https://h/x.tar.gz", "--include", "/a",
        "--include", "b=flake:nixpkgs", "--include", "channel:x",
        "--workers", "2", "--max-memory-size", "2048", "jobs.nix",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"7", b'{"attrPath": []}', b'{"attrPath": ["a7"], "drvPath": "x"}',
        b'{"attrPath": ["b0"], "drvPath": "x"}', b'{"attrPath": ["a0"]}', b"\xff",
        b'{"attrPath": ["a0"], "drvPath": 7}', b'{"attrPath": [0], "drvPath": "x"}',
        b'{"attrPath": ["a0", 7], "drvPath": "x"}', b'{"error": "error: of no attribute"}',
    ],
)  # fmt: skip
def test_what_is_no_answer_is_none(line: bytes) -> None:
    assert eval_jobs.read(line, [("x",)]) is None


def test_errors_and_places_are_read() -> None:
    said = b'{"attr": "a0.b c", "attrPath": ["a0", "b c"], "error": "error: no\\n\\n   at x:1"}'
    assert eval_jobs.read(said, [("x",)]) == eval_jobs.Line(0, 'x."b c"', True, "", "no at x:1")
