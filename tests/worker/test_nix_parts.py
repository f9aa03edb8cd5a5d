"""What the nix executor is made of, without Nix: complaints, memory of valid paths, derivations."""

from __future__ import annotations

from typing import ClassVar

import pytest

from actors.nix.serve import ServeFailed
from actors.worker.executors import nix_scoring
from actors.worker.executors.nix_fetch import trouble_of
from actors.worker.executors.nix_scoring import MISSING_SECS, VALID_SECS, ValidPaths
from actors.worker.executors.nix_spec import basic_derivation
from actors.worker.executors.spec import BadSpec
from tests.worker.conftest import build_job, candidate

UNREACHABLE = """warning: error: unable to download 'http://c/a.narinfo': Couldn't connect; retrying
\x1b[31;1merror:\x1b[0m unable to download 'http://c/a.narinfo': Couldn't connect (7)
"""


LOST = """copying path 'x' from 'file:///c'...
error: file 'nar/y' does not exist in binary cache
warning: build of 'x' failed
"""
NO_HOST = "error: cannot open connection to remote store 'ssh-ng://h'\n"


@pytest.mark.parametrize(
    ("said", "text", "is_unreachable"),
    [
        (UNREACHABLE, "unable to download 'http://c/a.narinfo': Couldn't connect (7)", True),
        (LOST, "file 'nar/y' does not exist in binary cache", False),
        (NO_HOST, "cannot open connection to remote store 'ssh-ng://h'", True),
    ],
)
def test_the_last_complaint_tells_why(said, text, is_unreachable):
    trouble = trouble_of(said)
    assert (trouble.text, trouble.is_unreachable) == (text, is_unreachable)


def test_silence_is_no_trouble():
    assert trouble_of("copying path 'x' from 'y'...\nwarning: build of 'x' failed\n") is None


class FakeStore:
    """Stands for `BlockingServe`."""

    valid: ClassVar[set[str]] = set()
    asked: ClassVar[list[list[str]]] = []
    fails = False

    def __init__(self, argv, env):
        pass

    def ask(self, request, reply):
        if self.fails:
            raise ServeFailed("gone")
        type(self).asked.append(request)
        return [path for path in request if path in self.valid]

    def close(self):
        pass


@pytest.fixture
def paths(monkeypatch):
    monkeypatch.setattr(FakeStore, "valid", {"/a", "/b"})
    monkeypatch.setattr(FakeStore, "asked", [])
    monkeypatch.setattr(nix_scoring.serve, "BlockingServe", FakeStore)
    monkeypatch.setattr(nix_scoring.serve, "query_valid_paths", lambda paths, **_: sorted(paths))
    clock = [0.0]
    made = ValidPaths([], {}, clock=lambda: clock[0])
    made.now = clock
    return made


def test_a_page_is_one_query_and_what_it_told_is_remembered(paths):
    page = [candidate("j1", [("/a", 10), ("/c", 5)], ["/b"]), candidate("j2", [("/c", 5)])]
    scores = paths.score(page)
    assert [(s.missing_count, s.missing_nar_size, s.outputs_present) for s in scores] == [
        (1, 5, True), (1, 5, False),
    ]  # fmt: skip
    assert FakeStore.asked == [["/a", "/b", "/c"]]
    paths.score(page)
    assert len(FakeStore.asked) == 1


def test_what_is_remembered_fades_the_missing_first(paths):
    paths.among(["/a", "/c"])
    paths.now[0] = MISSING_SECS + 1
    FakeStore.valid.add("/c")
    assert paths.among(["/a", "/c"]) == {"/a", "/c"}
    assert FakeStore.asked[-1] == ["/c"]
    paths.now[0] = VALID_SECS + 1
    FakeStore.valid.discard("/a")
    assert paths.among(["/a"]) == set()


def test_what_the_worker_did_itself_counts_at_once(paths):
    paths.among(["/a", "/c"])
    paths.add(["/c"])
    paths.drop(["/a"])
    assert paths.among(["/a", "/c"]) == {"/c"}
    assert len(FakeStore.asked) == 1


def test_memory_is_bounded(paths, monkeypatch):
    monkeypatch.setattr(nix_scoring, "MAX_REMEMBERED", 2)
    paths.among(["/a"])
    paths.among(["/b", "/c"])
    paths.among(["/b"])
    assert len(FakeStore.asked) == 2
    paths.among(["/a"])
    assert FakeStore.asked[-1] == ["/a"]


def test_a_store_that_fails_raises_and_is_asked_again(paths, monkeypatch):
    monkeypatch.setattr(FakeStore, "fails", True)
    with pytest.raises(ServeFailed):
        paths.among(["/a"])
    monkeypatch.setattr(FakeStore, "fails", False)
    assert paths.among(["/a"]) == {"/a"}


def job(**env):
    derivation = {"builder": "/bin/sh", "args": ["-c", "x"], "env": env}
    return build_job(derivation=derivation)


def test_a_job_without_a_builder_needs_its_drv_file():
    assert basic_derivation(build_job(derivation={"env": {"a": "b"}})) is None
    assert basic_derivation(build_job()) is None


ZEROS = f"sha256:{'00' * 32}"
STRUCTURED = f'{{"outputHash": "{ZEROS}", "outputHashMode": "nar"}}'


@pytest.mark.parametrize(
    ("env", "algorithm"),
    [
        ({}, "sha256"),
        ({"outputHashMode": "flat"}, "sha256"),
        ({"outputHashMode": "recursive"}, "r:sha256"),
        ({"outputHashMode": "nar"}, "r:sha256"),
        ({"outputHashMode": "text"}, "text:sha256"),
        ({"__json": STRUCTURED}, "r:sha256"),
    ],
)  # fmt: skip
def test_the_hash_of_a_fixed_output_is_in_its_attributes(env, algorithm):
    given = job(**({"outputHash": "sha256:" + "00" * 32} | env))
    output = basic_derivation(given).outputs["out"]
    assert (output.hash_algorithm, output.hash) == (algorithm, "00" * 32)


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"__contentAddressed": "1"}, "__contentAddressed derivations are not supported"),
        ({"__json": '{"__impure": true}'}, "__impure derivations are not supported"),
        ({"__json": "{"}, "env.__json is not valid JSON"),
        ({"outputHash": "sha256:00"}, "outputHash: '00' is not a hash of 32 bytes"),
        ({"outputHash": "00" * 32}, "names no algorithm"),
        ({"outputHash": "sha256:" + "00" * 32, "outputHashMode": "zip"}, "outputHashMode 'zip'"),
    ],
)
def test_what_cannot_be_built_so_is_refused(env, complaint):
    with pytest.raises(BadSpec, match=complaint):
        basic_derivation(job(**env))
