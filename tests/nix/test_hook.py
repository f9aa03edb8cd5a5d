"""Nix's build-hook protocol."""

from __future__ import annotations

import io
import json

import pytest

from actors.nix import hook, wire
from actors.nix.wire import BadFrame, Writer
from bin.hook import BadSettings, read_settings
from transport import messages as m


def reader(data: bytes):
    source = io.BytesIO(data)

    def read(size: int) -> bytes:
        found = source.read(size)
        if len(found) < size:
            raise EOFError
        return found

    return read


def test_settings_then_requests_then_what_follows_an_acceptance() -> None:
    written = Writer()
    for name, value in (("system", "x86_64-linux"), ("timeout", "7")):
        written.integer(1).string(name).string(value)
    written.integer(0)
    for system in ("builtin", "x86_64-linux"):
        written.string("try").boolean(True).string(system).string("/nix/store/x.drv")
        written.strings(["kvm"])
    written.strings(["/nix/store/in"]).strings(["out", "dev"])
    read = reader(written.done())
    assert wire.read(hook.settings(), read) == {"system": "x86_64-linux", "timeout": "7"}
    for system in ("builtin", "x86_64-linux"):
        asked = hook.Request(True, system, "/nix/store/x.drv", frozenset({"kvm"}))
        assert wire.read(hook.request(), read) == asked
    assert wire.read(hook.accepted(), read) == hook.Accepted(["/nix/store/in"], ["out", "dev"])
    with pytest.raises(EOFError):
        wire.read(hook.request(), read)


def test_another_word_is_no_request() -> None:
    with pytest.raises(BadFrame, match="'build'"):
        wire.read(hook.request(), reader(Writer().string("build").done()))


def worker(**changes: object) -> dict[str, object]:
    return {
        "state": "active", "capabilities": {"build": True}, "architectures": ["x86_64-linux"],
        "system_features": ["kvm"], "slots": {"build": {"used": 1, "max": 1}},
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("system", "features", "willing", "workers", "answer"),
    [
        ("x86_64-linux", [], True, [worker()], "accept"),  # full: the farm's queue takes it
        ("x86_64-linux", ["kvm"], False, [worker()], "accept"),
        ("x86_64-linux", ["gpu"], True, [worker()], "decline"),
        ("aarch64-linux", [], True, [worker()], "decline"),
        ("x86_64-linux", [], True, [worker(state="draining")], "decline"),
        ("x86_64-linux", [], True, [worker(capabilities={"build": False})], "decline"),
        ("x86_64-linux", [], True, [], "decline"),
        ("builtin", [], True, [worker()], "decline"),  # Nix fetches itself while it can
        ("builtin", [], False, [worker()], "accept"),
        ("x86_64-linux", ["gpu"], True, [worker(), worker(system_features=["gpu"])], "accept"),
    ],
)
def test_what_some_worker_could_build_is_accepted(system, features, willing, workers, answer):
    asked = hook.Request(willing, system, "/x.drv", frozenset(features))
    assert hook.decide(asked, workers) == answer


@pytest.mark.parametrize(
    ("features", "most", "room"),
    [([], 1_000, 5 + hook.QUEUED_BUILDS), (["gpu"], 1_000, 3 + hook.QUEUED_BUILDS), ([], 4, 4)],
)
def test_a_machine_has_no_more_builds_there_than_keep_the_farm_busy(features, most, room):
    two, three = {"build": {"used": 0, "max": 2}}, {"build": {"used": 3, "max": 3}}
    workers = [
        worker(slots=two),
        worker(slots=three, system_features=["gpu"]),
        worker(slots=three, state="draining"),
    ]
    asked = hook.Request(True, "x86_64-linux", "/x.drv", frozenset(features))
    assert hook.room(asked, workers, most) == room


def test_words_for_people_are_events_of_nix() -> None:
    line = hook.event('no "cache"\nthere')
    assert line.startswith(b"@nix ")
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    told = json.loads(line[5:])
    assert told == {"action": "msg", "level": 1, "msg": 'no "cache"\nthere'}


def test_answers_are_lines() -> None:
    assert hook.lines("decline") == b"# decline\n"
    assert hook.lines("decline-permanently") == b"# decline-permanently\n"
    assert hook.lines("accept") == b"# accept\nheadrace\n"


def test_the_job_waits_for_nothing_and_has_nix_own_limits() -> None:
    drv = m.SubmittedJob(
        drv_path="/nix/store/x.drv", name="x", system="s", required_features=[],
        outputs={"out": "/nix/store/x"}, input_drvs=["/nix/store/y.drv"],
        input_srcs=["/nix/store/src"],
    )  # fmt: skip
    job = hook.job(drv, ["/nix/store/in"], {"timeout": "9", "max-silent-time": "0"}, "p")
    assert (job.input_drvs, job.input_srcs, job.project) == ([], [], "p")
    assert job.required_paths == [m.RequiredPath("/nix/store/in")]
    assert (job.timeout_secs, job.max_silent_secs) == (9, 0)


@pytest.mark.parametrize(
    ("status", "code"),
    [("Completed", 0), ("Failed", 100), ("DependencyFailed", 100), ("TimedOut", 101),
     ("Aborted", 1)],
)  # fmt: skip
def test_exit_codes_are_those_that_nix_expects(status, code):
    assert hook.exit_code(status) == code


def test_to_nix_own_hook_the_cache_is_a_machine_that_has_built_it() -> None:
    drv = m.SubmittedJob(
        drv_path="/nix/store/x.drv", name="x", system="x86_64-linux",
        required_features=["kvm", "gpu"], outputs={"out": "/nix/store/x"},
        input_drvs=[], input_srcs=[],
    )  # fmt: skip
    told = {"store": "/srv", "builders": "@/etc/nix/machines", "narinfo-cache-negative-ttl": "9"}
    read = reader(hook.import_request(told, drv, ["out"], "file:///c?trusted=1", 7))
    assert wire.read(hook.settings(), read) == {
        "store": "/srv",
        "builders": "file:///c?trusted=1 x86_64-linux - 7 1 kvm,gpu -",
        "narinfo-cache-negative-ttl": "0",
        "narinfo-cache-positive-ttl": "0",
    }
    asked = hook.Request(False, "x86_64-linux", "/nix/store/x.drv", frozenset({"kvm", "gpu"}))
    assert wire.read(hook.request(), read) == asked
    assert wire.read(hook.accepted(), read) == hook.Accepted([], ["out"])


@pytest.mark.parametrize(
    ("said", "answer", "error"),
    [
        (b'@nix {"action":"start","id":1}\n# accept\nfile:///c\n', "accept", ""),
        (b"# postpone\n", "postpone", ""),
        (
            (
                b'@nix {"action":"msg","level":3,"msg":"copying"}\n# accept\nfile:///c\n'
                b'@nix {"action":"msg","level":0,"msg":"\\u001b[31merror:\\u001b[0m no\\n room"}\n'
            ),
            "accept",
            "no room",
        ),
        (b"@nix nonsense\n@nix [1]\n\xff", "", ""),
    ],
)
def test_what_nix_own_hook_says_is_understood(said, answer, error):
    assert hook.answered(said) == (answer, error)


def test_settings_are_of_the_environment_and_a_file(tmp_path) -> None:
    file = tmp_path / "hook.toml"
    env = {"HEADRACE_HOOK_CONFIG": str(file)}
    with pytest.raises(BadSettings, match="no cache"):
        read_settings(env)
    file.write_text('server = "tcp://h:1"\ncache = "file:///c"\nproject = "p"\n')
    assert read_settings(env) == {"server": "tcp://h:1", "cache": "file:///c", "project": "p"}
    assert read_settings(env | {"HEADRACE_SERVER": "ipc:///s"})["server"] == "ipc:///s"
    file.write_text('cach = "x"')
    with pytest.raises(BadSettings, match="unknown key 'cach'"):
        read_settings(env)
    file.write_text('cache = "file:///a b"')
    with pytest.raises(BadSettings, match="%20"):
        read_settings(env)
    file.write_text("nonsense")
    with pytest.raises(BadSettings, match=r"hook\.toml"):
        read_settings(env)
