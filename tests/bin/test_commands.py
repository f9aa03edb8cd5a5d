from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from bin import main as main_module
from bin import operate, summary
from bin.errors import CommandError
from bin.main import COMMANDS, main
from transport import messages as m

JOB = {
    "drv_path": "/nix/store/a.drv", "name": "a", "system": "x86_64-linux",
    "required_features": [], "outputs": {"out": "/nix/store/a"}, "input_drvs": [],
    "input_srcs": [],
}  # fmt: skip
CLIENT_COMMANDS = {
    "status": ["--once"],
    "jobs": [],
    "wait": [],
    "logs": ["j"],
    "explain": ["j"],
    "cancel": ["j"],
    "prioritize": ["j"],
    "drain": ["w"],
    "undrain": ["w"],
}


@pytest.fixture
def graph(tmp_path):
    file = tmp_path / "graph.json"
    needs = JOB | {"drv_path": "/nix/store/b.drv", "name": "b", "outputs": {"out": "/nix/store/b"},
                   "input_drvs": ["/nix/store/a.drv"]}  # fmt: skip
    file.write_text(json.dumps({"jobs": [needs, JOB]}))
    return str(file)


SUBMITTED = m.CmdSubmitted(
    request=0, is_final=True, submission="s-1",
    jobs={"/nix/store/a.drv": "j1", "/nix/store/b.drv": "j2"},
)  # fmt: skip


# -- submit ----------------------------------------------------------------------------------


def test_submit_sends_inputs_first(headrace, server, graph):
    server.on(m.CmdSubmit, SUBMITTED)
    assert headrace("submit", graph) == (0, "submitted 2 builds as s-1\n", "")
    (sent,) = server.requests
    assert [job.name for job in sent.jobs] == ["a", "b"]
    assert not sent.assume_inputs_built


def test_submit_json(headrace, server, graph):
    server.on(m.CmdSubmit, SUBMITTED)
    code, out, err = headrace("submit", graph, "--json", "--assume-inputs-built")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "submission": "s-1",
        "jobs": {"/nix/store/a.drv": "j1", "/nix/store/b.drv": "j2"},
        "evaluations": [],
        "clusters": [],
    }
    assert server.requests[0].assume_inputs_built


def test_submit_from_standard_input(headrace, server, graph, monkeypatch):
    server.on(m.CmdSubmit, SUBMITTED)
    with Path(graph).open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert headrace("submit", "-")[0] == 0
    assert len(server.requests[0].jobs) == 2


@pytest.mark.parametrize(("failed", "code"), [(0, 0), (1, 1)])
def test_submit_and_wait(headrace, server, graph, failed, code):
    server.on(m.CmdSubmit, SUBMITTED)
    server.on(m.CmdWait, m.CmdWaitReply(request=0, open=0, failed=failed))
    exit_code, out, err = headrace("submit", graph, "--wait")
    assert exit_code == code
    assert out == "submitted 2 builds as s-1\n"
    assert bool(err) == bool(failed)
    assert server.requests[-1].jobs == ["j1", "j2"]


def test_submit_refused(headrace, server, graph):
    server.on(m.CmdSubmit, m.CmdError(request=0, code=4, message="this key may not submit"))
    assert headrace("submit", graph) == (4, "", "headrace: this key may not submit\n")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"jobs": [{}]}', "jobs[0]: object missing required field `drv_path`"),
        (json.dumps({"jobs": [JOB, JOB]}), "derivation /nix/store/a.drv was already given"),
        (json.dumps({"jobs": [JOB | {"input_drvs": ["/nix/store/a.drv"]}]}), "names the derivat"),
        ('{"clusters": [{}]}', "clusters[0]: object missing required field `members`"),
        ('{"clusters": [{"members": []}]}', "clusters[0]: field `members` is empty"),
    ],
)
def test_submit_of_a_bad_file(headrace, server, tmp_path, content, said):
    file = tmp_path / "f.json"
    file.write_text(content)
    code, out, err = headrace("submit", str(file))
    assert (code, out) == (2, "")
    assert err.startswith(f"headrace: {file}: ")
    assert said in err
    assert err.count("\n") == 1
    assert server.dealers == []


def test_submit_of_no_file(headrace, tmp_path):
    missing = str(tmp_path / "none.json")
    assert headrace("submit", missing) == (
        2,
        "",
        f"headrace: {missing}: No such file or directory\n",
    )


# -- status, jobs, wait, logs ----------------------------------------------------------------


def test_status_json_is_the_servers_object(headrace, server, status):
    server.on(m.CmdStatus, m.CmdStatusReply(request=0, status=status))
    code, out, err = headrace("status", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == status


def test_status_once(headrace, server, status):
    server.on(m.CmdStatus, m.CmdStatusReply(request=0, status=status))
    assert headrace("status", "--once") == (0, "\n".join(summary.lines(status)) + "\n", "")


def test_status_choices_exclude_each_other(headrace):
    code, _, err = headrace("status", "--watch", "--once")
    assert code == 2
    assert "choose one" in err


def job_row(i: int, **changes) -> dict:
    return {
        "job_id": f"j{i}", "kind": "build", "status": "Completed", "name": f"n{i}",
        "worker": "w", "assignment_id": f"a{i}", "attempts": 0,
    } | changes  # fmt: skip


def test_jobs_are_collected_from_pages(headrace, server):
    server.on(
        m.CmdJobs,
        m.CmdJobsReply(request=0, jobs=[job_row(1), job_row(2)], next="j2"),
        m.CmdJobsReply(request=0, jobs=[job_row(3)]),
    )
    code, out, _ = headrace("jobs", "--json", "--status", "completed")
    assert code == 0
    assert [row["job_id"] for row in json.loads(out)] == ["j1", "j2", "j3"]
    assert [(r.after, r.status) for r in server.requests] == [
        (None, "Completed"),
        ("j2", "Completed"),
    ]


def test_jobs_for_people(headrace, server):
    rows = [job_row(1), job_row(20, worker=None, assignment_id=None, status="Queued", name="a\x1b")]
    server.on(m.CmdJobs, m.CmdJobsReply(request=0, jobs=rows))
    assert headrace("jobs")[1].splitlines() == [
        "job_id  kind   status     name  worker  assignment_id  attempts  cluster",
        "j1      build  Completed  n1    w       a1             0         -",
        "j20     build  Queued     a?    -       -              0         -",
    ]


def test_no_such_status(headrace):
    code, _, err = headrace("jobs", "--status", "Done")
    assert code == 2
    assert "'Done' is not one of" in err


@pytest.mark.parametrize(("failed", "code"), [(0, 0), (2, 1)])
def test_wait(headrace, server, failed, code):
    server.on(m.CmdWait, m.CmdWaitReply(request=0, open=0, failed=failed))
    exit_code, out, err = headrace("wait", "j1", "j2")
    assert (exit_code, out) == (code, "")
    assert err == "" or err.startswith("headrace: 2 jobs did not complete")
    assert server.requests[0].jobs == ["j1", "j2"]


def test_wait_in_vain(headrace, server):
    server.on(m.CmdWait, m.CmdWaitReply(request=0, open=3, failed=0))
    code, out, err = headrace("wait", "--timeout", "0.05", "--json")
    assert (code, json.loads(out)) == (1, {"open": 3, "failed": 0})
    assert err.startswith("headrace: 3 jobs are still open after 0.05 s")


def chunk(data: bytes, offset: int, is_end: bool = False) -> m.CmdLogsReply:
    return m.CmdLogsReply(request=0, job_id="j-full", offset=offset, data=data, is_end=is_end)


def test_logs_of_what_there_is(headrace, server):
    server.on(m.CmdLogs, chunk(b"one\n", 4), chunk(b"", 4))
    assert headrace("logs", "j") == (0, "one\n", "")
    assert [(r.job, r.offset) for r in server.requests] == [("j", 0), ("j-full", 4)]


def test_logs_to_the_end(headrace, server):
    server.on(m.CmdLogs, chunk(b"one\n", 4), chunk(b"", 4), chunk(b"two\n", 8, is_end=True))
    assert headrace("logs", "j", "--follow") == (0, "one\ntwo\n", "")


# -- operating -------------------------------------------------------------------------------


def test_cancel_says_what_is_so(headrace, server):
    reply = m.CmdCancelReply(request=0, aborted=["j1"], requested=["j2"], unchanged=["j3"])
    server.on(m.CmdCancel, reply)
    assert headrace("cancel", "s-1", "j3")[1].splitlines() == [
        "j1 aborted",
        "j2 abort requested",
        "j3 unchanged: it has ended, or another submission wants it",
    ]
    assert server.requests[0].targets == ["s-1", "j3"]
    assert json.loads(headrace("cancel", "j", "--json")[1]) == {
        "aborted": ["j1"], "requested": ["j2"], "unchanged": ["j3"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "request_", "said"),
    [
        (["prioritize", "a", "b"], m.CmdPrioritize(request=1, targets=["a", "b"]), "prioritized"),
        (["prioritize", "a", "--off"],
         m.CmdPrioritize(request=1, targets=["a"], prioritized=False), "no longer prioritized"),
        (["drain", "w", "--reason", "disk"], m.CmdDrain(request=1, worker="w", reason="disk"),
         "w is drained"),
        (["undrain", "w"], m.CmdUndrain(request=1, worker="w"), "w takes jobs again"),
    ],
)  # fmt: skip
def test_what_an_operator_does(headrace, server, args, request_, said):
    server.on(type(request_), m.CmdDone(request=0))
    assert headrace(*args) == (0, f"{said}\n", "")
    assert server.requests == [request_]


# -- every command ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", CLIENT_COMMANDS)
def test_a_server_that_cannot_be_reached(headrace, server, command):
    server.down = 10**9
    code, out, err = headrace(command, *CLIENT_COMMANDS[command])
    assert (code, out) == (3, "")
    assert err.startswith("headrace: cannot reach a server at tcp://127.0.0.1:7420")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", CLIENT_COMMANDS)
def test_a_command_that_is_refused(headrace, server, command):
    server.greeting = m.Reject(code=403, reason="unknown key")
    code, _, err = headrace(command, *CLIENT_COMMANDS[command])
    assert (code, err) == (4, "headrace: tcp://127.0.0.1:7420 refused: unknown key\n")


@pytest.mark.parametrize("server_url", ["localhost:7420", "tcp://localhost", "http://x:1",
                                        "tcp://h:99999", "ipc://"])  # fmt: skip
def test_an_address_that_is_none(headrace, server_url):
    code, _, err = headrace("status", "--once", "--server", server_url)
    assert code == 2
    assert "is no address; write tcp://HOST:PORT" in err
    assert err.count("\n") == 1


def test_the_address_comes_from_the_environment(headrace, server, monkeypatch):
    monkeypatch.setenv("HEADRACE_SERVER", "tcp://[fe80::1]:9")
    server.down = 10**9
    assert "tcp://[fe80::1]:9" in headrace("undrain", "w")[2]


# -- the program -----------------------------------------------------------------------------


def test_no_such_command(capsys):
    assert main(["stauts"]) == 2
    assert capsys.readouterr().err == (
        "headrace: no such command: 'stauts'; did you mean 'status'?; see `headrace --help`\n"
    )


@pytest.mark.parametrize("args", [["--help"], ["-h"], []])
def test_help_lists_every_command(capsys, args):
    assert main(args) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name}" in out for name in COMMANDS)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["submit"], "Missing argument 'FILE'; see `headrace submit --help`"),
        (["jobs", "--nope"], "No such option"),
        (["--nope"], "No such option"),
        (["wait", "--timeout", "soon"], "'soon' is not a valid float range"),
    ],
)
def test_usage_is_one_line(capsys, args, said):
    assert main(args) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("headrace: ")
    assert err.count("\n") == 1


def failing(error: BaseException):
    def run(*_):
        raise error

    return run


def test_a_bug_has_no_traceback_unless_asked_for(headrace, monkeypatch):
    monkeypatch.setattr(operate, "run", failing(RuntimeError("odd\nthing")))
    assert headrace("undrain", "w") == (
        1, "", "headrace: RuntimeError: odd thing (a bug; --debug shows where)\n"
    )  # fmt: skip
    code, _, err = headrace("--debug", "undrain", "w")
    assert code == 1
    assert "Traceback" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (BaseExceptionGroup("", [ValueError(), KeyboardInterrupt()]), 130),
    ],
)
def test_an_interrupt_is_silent(headrace, monkeypatch, error, code):
    monkeypatch.setattr(operate, "run", failing(error))
    assert headrace("undrain", "w") == (code, "", "")


def test_the_known_error_of_a_group_is_told(headrace, monkeypatch):
    group = ExceptionGroup("", [RuntimeError(), ExceptionGroup("", [CommandError("known", 3)])])
    monkeypatch.setattr(operate, "run", failing(group))
    assert headrace("undrain", "w") == (3, "", "headrace: known\n")


CHECK_IMPORTS = """
import sys
from bin.main import main
assert main(["--help"]) == main(["--version"]) == 0
sys.exit(",".join({"trio", "numpy", "rich", "zmq", "msgspec"} & set(sys.modules)) or 0)
"""


def test_slow_modules_wait_for_their_commands():
    argv = [sys.executable, "-c", CHECK_IMPORTS]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_left():
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bin", "--help"],
            stdout=write,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write)
    assert done.stderr == b""
    assert done.returncode == 141


def test_every_option_has_a_variable():
    context = click.Context(main_module.cli)
    for name in COMMANDS:
        command = main_module.cli.get_command(context, name)
        for param in command.params:
            if isinstance(param, click.Option) and param.name != "help":
                flag = max(param.opts, key=len)[2:].upper().replace("-", "_")
                assert param.envvar[0] == f"HEADRACE_{flag}", (name, flag)


# -- keygen ----------------------------------------------------------------------------------


def test_keygen(capsys, tmp_path):
    secret = tmp_path / "server.key"
    assert main(["keygen", str(secret)]) == 0
    public = capsys.readouterr().out.strip()
    assert (tmp_path / "server.key.pub").read_text().strip() == public
    assert secret.stat().st_mode & 0o777 == 0o600
    assert main(["keygen", str(secret)]) == 2
    assert "keys are not overwritten" in capsys.readouterr().err


def test_keygen_json(capsys, tmp_path):
    secret = tmp_path / "k"
    assert main(["keygen", str(secret), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told.pop("public_key")) == 40
    assert told == {"secret_file": str(secret), "public_file": f"{secret}.pub"}


def test_a_key_that_is_none(capsys, tmp_path):
    key = tmp_path / "key"
    key.write_text("no key")
    assert main(["status", "--once", "--server-key", str(key)]) == 2
    assert f"key file {key} does not hold a key" in capsys.readouterr().err
    assert main(["status", "--once", "--key", str(key)]) == 2
    assert "--key needs --server-key" in capsys.readouterr().err
