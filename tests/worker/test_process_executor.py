"""The embedded executor with real, small processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
import trio

from actors.worker import signals
from actors.worker.config import ConfigError, WorkerConfig
from actors.worker.executors import process as process_module
from actors.worker.executors.base import Built, Evaluated, Failed, Spans
from actors.worker.executors.process import ProcessExecutor
from actors.worker.executors.spec import build_spec
from actors.worker.executors.store import DirectoryStore, Relocation
from actors.worker.signal_lines import Signal
from actors.worker.signals import Member
from transport import messages as m


class Context:
    """Keeps what a job reports."""

    job_id = "j1"
    assignment_id = "a1"
    member = None

    def __init__(self):
        self.spans = Spans()
        self.output = b""
        self.updates = []
        self.derivations = []
        self.peaks = []
        self.progress = []
        self.log_gate = trio.Event()
        self.log_gate.set()

    async def log(self, data):
        await self.log_gate.wait()
        self.output += data

    async def update(self, update):
        await trio.lowlevel.checkpoint()
        self.updates.append(update)

    async def advance_build(self, phase, **fields):
        await trio.lowlevel.checkpoint()
        self.progress.append((phase, fields))

    async def advance_eval(self, derivations):
        await trio.lowlevel.checkpoint()
        self.derivations.append(derivations)

    def observe_peak(self, ram_mb):
        self.peaks.append(ram_mb)


@pytest.fixture
def context():
    return Context()


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def executor(store, tmp_path):
    made = ProcessExecutor(store, tmp_path / "builds")
    made.start()
    return made


def job(script, name="p", *, outputs=None, inputs=(), timeout=0, silent=0, **derivation):
    outputs = outputs or {"out": f"/nix/store/{name}"}
    return m.BuildJob(
        project="default",
        drv_path=f"/nix/store/{name}.drv",
        name=name,
        outputs=outputs,
        requirement=m.Requirement("x86_64-linux", []),
        required_paths=[m.RequiredPath(path) for path in inputs],
        timeout_secs=timeout,
        max_silent_secs=silent,
        derivation={"builder": "/bin/sh", "args": ["-c", script], "env": {}} | derivation,
    )


async def until(condition):
    with trio.fail_after(10):
        while not condition():
            await trio.sleep(0.01)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- what is built -----------------------------------------------------------------------


async def test_build_registers_its_outputs(executor, store, context, tmp_path):
    outputs = {"out": "/nix/store/p", "dev": "/nix/store/p-dev"}
    script = "echo working; mkdir $out; printf abc > $out/file; printf 12345 > $dev"
    built = await executor.run_build(job(script, outputs=outputs), context)
    assert isinstance(built, Built)
    assert not built.substituted
    assert built.outputs["out"] == m.Output("/nix/store/p", nar_size=3)
    assert built.outputs["dev"] == m.Output("/nix/store/p-dev", nar_size=5)
    assert (tmp_path / "store/p/file").read_text() == "abc"
    assert all(map(store.is_valid, outputs.values()))
    assert context.output == b"working\n"
    assert built.metrics.output_nar_size == 8
    assert built.metrics.disk_bytes >= 0
    assert built.metrics.oom is None
    assert [span.phase for span in built.spans] == ["build"]
    assert list((tmp_path / "builds").iterdir()) == []
    assert list((tmp_path / "store/.headrace/locks").iterdir()) == []


async def test_valid_outputs_are_not_built_again(executor, context):
    await executor.run_build(job("echo one > $out"), context)
    built = await executor.run_build(job("exit 1"), context)
    assert isinstance(built, Built)
    assert built.substituted
    assert built.outputs["out"].nar_size == 4


async def test_environment_is_like_nixs(executor, context, tmp_path):
    script = """
    test "$PWD" = "$NIX_BUILD_TOP" && test "$TMPDIR" = "$PWD" && test -w "$PWD" || exit 1
    test "$HOME" = /homeless-shelter || exit 2
    test "$NIX_STORE" = "%s" || exit 3
    test "$greeting" = "hi from $NIX_STORE/dep" || exit 4
    test "$(cat "$longPath")" = "text" && test -z "$long" || exit 5
    echo "$0" "$1" > $out
    """
    derivation = {
        "args": ["-c", script % (tmp_path / "store"), "zero", "/nix/store/arg"],
        "env": {"greeting": "hi from /nix/store/dep", "passAsFile": "long", "long": "text"},
    }
    built = await executor.run_build(job("", **derivation), context)
    assert isinstance(built, Built), built
    assert (tmp_path / "store/p").read_text() == f"zero {tmp_path}/store/arg\n"


async def test_builder_of_the_store_is_relocated(executor, context):
    tool = "#!/bin/sh\necho made by $0 > $out"
    script = f"printf '%s' '{tool}' > $out; chmod +x $out"
    await executor.run_build(job(script, name="tool"), context)
    made = job("", name="q", builder="/nix/store/tool", args=[])
    built = await executor.run_build(made, context)
    assert isinstance(built, Built), built


async def test_leftover_of_a_killed_worker_does_not_count(executor, store, context, tmp_path):
    (tmp_path / "store/p").mkdir()
    (tmp_path / "store/p/half").write_text("half")
    assert not store.is_valid("/nix/store/p")
    built = await executor.run_build(job("test ! -e $out && echo whole > $out"), context)
    assert isinstance(built, Built)
    assert (tmp_path / "store/p").read_text() == "whole\n"


async def test_worker_ends_builders_that_its_predecessor_left(executor, store, tmp_path):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(executor.run_build, job("echo $$ > pid; sleep 60"), Context())
        builds = tmp_path / "builds"
        await until(lambda: list(builds.glob("*/pid")) and next(builds.glob("*/pid")).read_text())
        pid = int(next(builds.glob("*/pid")).read_text())
        ProcessExecutor(store, builds).start()
        await until(lambda: not is_running(pid))
        assert list(builds.iterdir()) == []
        nursery.cancel_scope.cancel()


async def test_two_workers_building_the_same_output_build_it_once(tmp_path):
    outcomes = []

    async def build(worker):
        executor = ProcessExecutor(DirectoryStore(tmp_path / "store"), tmp_path / worker)
        executor.start()
        script = f"echo x >> {tmp_path}/count; sleep 0.2; echo done > $out"
        outcomes.append(await executor.run_build(job(script), Context()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(build, "one")
        nursery.start_soon(build, "two")
    assert sorted(outcome.substituted for outcome in outcomes) == [False, True]
    assert (tmp_path / "count").read_text() == "x\n"


async def test_builders_of_a_killed_worker_keep_others_out(executor, store, tmp_path):  # chaos
    script = "echo begin $$ > $out; sleep 0.6; echo end $$ >> $out"
    relocate = Relocation("/nix/store/p.drv", store.directory)
    orphan = executor._begin(job(script), build_spec(job(script)), relocate, {})
    for handle, _ in orphan.lock._held:  # all that the kernel does for a process that is killed
        os.close(handle)
    await until((tmp_path / "store/p").exists)
    other = ProcessExecutor(store, tmp_path / "other")
    other.start()
    built = await other.run_build(job(script), Context())
    assert isinstance(built, Built)
    assert orphan.group._process.poll() == 0
    os.close(orphan.group._output)
    begin, end = (tmp_path / "store/p").read_text().splitlines()
    assert begin.removeprefix("begin ") == end.removeprefix("end ") != str(orphan.group.pid)


async def test_a_lock_that_nobody_lets_go_of_is_not_waited_for_for_ever(
    executor, store, context, monkeypatch
):
    monkeypatch.setattr(process_module, "LOCK_WAIT_SECS", 0.2)
    held = store.try_lock(["/nix/store/p"])
    failed = await executor.run_build(job("echo > $out"), context)
    assert failed.kind == "Transient"
    assert "/nix/store/p" in failed.error
    held.release()
    assert isinstance(await executor.run_build(job("echo > $out"), context), Built)


async def test_a_builder_that_says_so_found_no_space_whatever_is_free_now(executor, context):
    script = "echo 'cp: error writing: No space left on device' >&2; echo more; exit 1"
    failed = await executor.run_build(job(script), context)
    assert failed.kind == "Transient"
    assert "no space" in failed.error
    assert (await executor.run_build(job("echo space; exit 1"), context)).kind == "Permanent"


async def test_a_disk_that_was_full_while_it_ran_counts_whatever_is_free_now(
    executor, context, monkeypatch
):  # chaos, seed 103
    looks = []

    def look(directory):
        looks.append(directory)
        return len(looks) == 3  # the first two at the start, this one while it runs

    monkeypatch.setattr("actors.worker.executors.group.is_full", look)
    failed = await executor.run_build(job("sleep 0.8; echo sh: I/O error >&2; exit 1"), context)
    assert len(looks) >= 3
    assert failed.kind == "Transient"
    assert "no space" in failed.error


# -- inputs ------------------------------------------------------------------------------


DEPENDENT = {"input_drvs": ["/nix/store/dep.drv"], "input_srcs": ["/nix/store/src"]}


async def test_absent_input_of_a_shared_store_is_unavailable(executor, context):
    dependent = job("echo > $out", inputs=["/nix/store/dep", "/nix/store/src"], **DEPENDENT)
    failed = await executor.run_build(dependent, context)
    assert failed.kind == "InputsUnavailable"
    assert failed.missing_paths == ["/nix/store/dep"]


async def test_absent_source_says_nothing(executor, context):
    await executor.run_build(job("echo dep > $out", name="dep"), context)
    dependent = job("cat $dep > $out", inputs=["/nix/store/dep", "/nix/store/src"], **DEPENDENT)
    dependent.derivation["env"]["dep"] = "/nix/store/dep"
    assert isinstance(await executor.run_build(dependent, context), Built)


@pytest.mark.parametrize(("script", "kind"), [("echo > $out", None), ("cat $dep", True)])
async def test_absent_input_of_a_private_store_counts_once_the_builder_fails(
    tmp_path, context, script, kind
):
    executor = ProcessExecutor(
        DirectoryStore(tmp_path / "store"), tmp_path / "builds", is_shared=False
    )
    executor.start()
    dependent = job(script, inputs=["/nix/store/dep"], **DEPENDENT)
    dependent.derivation["env"]["dep"] = "/nix/store/dep"
    outcome = await executor.run_build(dependent, context)
    if kind is None:
        assert isinstance(outcome, Built)
    else:
        assert outcome.kind == "InputsUnavailable"
        assert outcome.missing_paths == ["/nix/store/dep"]


# -- failures ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "kind", "text"),
    [
        ("echo x > $out; exit 3", "Permanent", "exit code 3"),
        ("true", "Permanent", "failed to produce output path /nix/store/p"),
        ("kill -9 $$", "Transient", "SIGKILL"),
        ("kill -TERM $$", "Transient", "SIGTERM"),
        ("kill -SEGV $$", "Permanent", "SIGSEGV"),
    ],
)
async def test_failed_builder(executor, store, context, tmp_path, script, kind, text):
    failed = await executor.run_build(job(script), context)
    assert isinstance(failed, Failed)
    assert failed.kind == kind
    assert text in failed.error
    assert failed.metrics.wall_time_ms >= 0
    assert not store.is_valid("/nix/store/p")
    assert not (tmp_path / "store/p").exists()
    assert list((tmp_path / "builds").iterdir()) == []


@pytest.mark.parametrize(
    ("derivation", "text"),
    [
        ({"builder": "builtin:fetchurl"}, "builtin:fetchurl"),
        ({"builder": None}, "names no builder"),
        ({"builder": "/nix/store/nowhere/bin/bash"}, "No such file"),
        ({"args": ["a\0b"]}, "cannot run the builder"),
        ({"args": 5}, "cannot be read"),
    ],
)
async def test_job_that_cannot_be_run_here(executor, context, tmp_path, derivation, text):
    failed = await executor.run_build(job("true", **derivation), context)
    assert failed.kind == "Permanent"
    assert text in failed.error
    assert "\n" not in failed.error
    assert list((tmp_path / "builds").iterdir()) == []
    assert list((tmp_path / "store/.headrace/locks").iterdir()) == []


@pytest.mark.parametrize("path", ["/nix/store/../etc", "/nix/store/..", "/etc/x", "/nix/store/.a"])
async def test_output_outside_of_the_store_is_refused(executor, context, path):
    failed = await executor.run_build(job("true", outputs={"out": path}), context)
    assert failed.kind == "Permanent"


async def test_memory_death_is_told_apart(executor, context, monkeypatch):
    counts = iter([7, 8])
    monkeypatch.setattr("actors.worker.executors.group.oom_kills", lambda: next(counts))
    failed = await executor.run_build(job("kill -9 $$"), context)
    assert failed.kind == "Transient"
    assert failed.metrics.oom is True


async def test_full_disk_is_not_the_builds_fault(executor, context, monkeypatch):  # FIELD 23
    monkeypatch.setattr(process_module, "is_full", lambda directory: True)
    failed = await executor.run_build(job("exit 1"), context)
    assert failed.kind == "Transient"
    assert "no space" in failed.error


# -- limits and ends ---------------------------------------------------------------------


async def test_wall_limit_ends_the_whole_session(executor, context):
    script = "trap '' TERM; (trap '' TERM; echo $$; sleep 60) & sleep 60 & echo $!; wait"
    failed = await executor.run_build(job(script, timeout=1), context)
    assert failed.kind == "Timeout"
    assert "after 1 s" in failed.error
    pids = [int(line) for line in context.output.split()]
    assert len(pids) == 2
    await until(lambda: not any(map(is_running, pids)))


async def test_silence_limit_counts_from_the_last_output(executor, context):
    script = "for i in 1 2 3; do echo $i; sleep 0.6; done; sleep 60"
    failed = await executor.run_build(job(script, silent=1), context)
    assert failed.kind == "Timeout"
    assert "without output" in failed.error
    assert context.output == b"1\n2\n3\n"


async def test_slow_log_reader_is_not_the_builders_silence(executor, context):
    context.log_gate = trio.Event()
    async with trio.open_nursery() as nursery:

        async def open_later():
            await trio.sleep(1.5)
            context.log_gate.set()

        nursery.start_soon(open_later)
        built = await executor.run_build(job("echo hi; sleep 0.5; echo > $out", silent=1), context)
    assert isinstance(built, Built)
    assert context.output == b"hi\n"


async def test_cancelled_build_leaves_no_process_and_no_output(executor, context, tmp_path):
    script = "echo $$; echo half > $out; sleep 60 & echo $!; wait"
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(executor.run_build, job(script), context)
            await until(lambda: context.output.count(b"\n") == 2)
            scope.cancel()
    pids = [int(line) for line in context.output.split()]
    await until(lambda: not any(map(is_running, pids)))
    assert not (tmp_path / "store/p").exists()
    assert list((tmp_path / "builds").iterdir()) == []
    assert list((tmp_path / "store/.headrace/locks").iterdir()) == []


async def test_what_a_builder_leaves_in_the_background_ends_with_it(executor, context):
    built = await executor.run_build(job("sleep 60 & echo $!; echo > $out"), context)
    assert isinstance(built, Built)
    await until(lambda: not is_running(int(context.output)))


async def test_daemon_that_left_the_session_does_not_hold_the_build_up(executor, context):
    script = (
        "python3 -c 'import os,time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)' &"
        " while ! test -s ready; do sleep 0.02; test -d . && echo > ready; done; sleep 0.5;"
        " echo > $out"
    )
    with trio.fail_after(20):
        built = await executor.run_build(job(script), context)
    assert isinstance(built, Built)
    for pid in context.output.split():
        os.kill(int(pid), signal.SIGKILL)


async def test_chatty_builder_waits_for_the_reader(executor, context, tmp_path):
    context.log_gate = trio.Event()
    script = f"head -c 3000000 /dev/zero; echo > {tmp_path}/written; echo > $out"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(executor.run_build, job(script), context)
        await trio.sleep(0.3)
        assert not (tmp_path / "written").exists()
        context.log_gate.set()
    assert len(context.output) == 3_000_000


async def test_log_limit_drops_the_rest(executor, context, monkeypatch):
    monkeypatch.setattr(process_module, "MAX_LOG_BYTES", 1000)
    built = await executor.run_build(job("head -c 500000 /dev/zero; echo > $out"), context)
    assert isinstance(built, Built)
    assert context.output.count(b"\0") == 1000
    assert b"log limit" in context.output


async def test_memory_of_the_whole_tree_is_sampled(executor, context):
    hog = "python3 -c 'import time; x = b\"1\" * 80_000_000; time.sleep(1.2)'"
    built = await executor.run_build(job(f"{hog} & {hog} & wait; echo > $out"), context)
    assert built.metrics.peak_ram_mb >= 150
    assert max(context.peaks) == built.metrics.peak_ram_mb
    assert built.metrics.cpu_time_ms > 0
    assert built.metrics.wall_time_ms >= 1200


# -- scoring -----------------------------------------------------------------------------


def candidate(paths=(), outputs=()):
    return m.JobCandidate(
        "j1", "build", "default", [m.RequiredPath(p, s) for p, s in paths], [], list(outputs)
    )


async def test_scores_count_what_the_store_lacks(executor, context):  # 48-50
    await executor.run_build(job("echo > $out", name="here"), context)
    inputs = [("/nix/store/here", 9), ("/nix/store/a", 200), ("/nix/store/b", None)]
    scored = executor.score(
        [
            candidate(inputs),
            candidate(),
            candidate(outputs=["/nix/store/here"]),
            candidate(outputs=["/nix/store/here", "/nix/store/a"]),
            candidate([("no store path", 5)]),
        ]
    )
    assert scored == [
        m.Score("j1", 2, 200, False),
        m.Score("j1", 0, 0, False),
        m.Score("j1", 0, 0, True),
        m.Score("j1", 0, 0, False),
        m.Score("j1", 1, 5, False),
    ]


def test_store_error_for_a_path_counts_it_as_missing(executor, store, monkeypatch):  # 53
    def is_valid(path):
        if path.endswith("broken"):
            raise OSError("I/O error")
        return True

    monkeypatch.setattr(store, "is_valid", is_valid)
    paths = [("/nix/store/fine", 1), ("/nix/store/broken", 2)]
    assert executor.score([candidate(paths)]) == [m.Score("j1", 1, 2, False)]


# -- evaluations -------------------------------------------------------------------------


GRAPH = """{"jobs": [
  {"drv_path": "/nix/store/b.drv", "name": "b", "system": "s", "required_features": [],
   "outputs": {"out": "/nix/store/b"}, "input_drvs": ["/nix/store/a.drv"], "input_srcs": [],
   "builder": "/bin/sh", "args": ["-c", "x"], "env": {"k": "v"}},
  {"drv_path": "/nix/store/a.drv", "name": "a", "system": "s", "required_features": ["kvm"],
   "outputs": {"out": "/nix/store/a"}, "input_drvs": [], "input_srcs": []},
  {"drv_path": "/nix/store/c.drv", "name": "c", "system": "s", "required_features": [],
   "outputs": {"out": "/nix/store/c"}, "input_drvs": [], "input_srcs": []}]}"""


def evaluation(ref, attributes=(), timeout=0, kind="graph-file"):
    return m.EvalJob("default", m.EvalSource(kind, str(ref)), list(attributes), timeout)


async def test_graph_file_is_reported_inputs_first(executor, context, tmp_path):
    (tmp_path / "g.json").write_text(GRAPH)
    outcome = await executor.run_eval(evaluation(tmp_path / "g.json"), context)
    assert isinstance(outcome, Evaluated)
    assert isinstance(context.updates[0], m.Evaluating)
    derivations = context.updates[1].derivations
    assert [d.name for d in derivations] == ["a", "b", "c"]
    assert type(derivations[0]) is m.Derivation
    assert derivations[1].env == {"k": "v"}
    assert context.derivations == [3]


async def test_attributes_select_with_what_they_need(executor, context, tmp_path):
    (tmp_path / "g.json").write_text(GRAPH)
    await executor.run_eval(evaluation(tmp_path / "g.json", ["b"]), context)
    assert [d.name for d in context.updates[1].derivations] == ["a", "b"]


async def test_large_graph_comes_in_batches_of_50(executor, context, tmp_path):
    entry = (
        '{"drv_path": "/nix/store/%d.drv", "name": "n", "system": "s", "required_features": [],'
        '"outputs": {"out": "/nix/store/%d"}, "input_drvs": [], "input_srcs": []}'
    )
    entries = ",".join(entry % (i, i) for i in range(120))
    (tmp_path / "g.json").write_text(f'{{"jobs": [{entries}]}}')
    await executor.run_eval(evaluation(tmp_path / "g.json"), context)
    assert [len(u.derivations) for u in context.updates[1:]] == [50, 50, 20]


@pytest.mark.parametrize(
    ("content", "attributes", "text"),
    [
        (None, [], "cannot read the graph file"),
        ("{", [], "not valid JSON"),
        (GRAPH, ["zzz"], "no derivation is named 'zzz'"),
    ],
)
async def test_bad_graph_file_fails_in_one_line(
    executor, context, tmp_path, content, attributes, text
):
    if content is not None:
        (tmp_path / "g.json").write_text(content)
    failed = await executor.run_eval(evaluation(tmp_path / "g.json", attributes), context)
    assert failed.kind == "Permanent"
    assert text in failed.error
    assert "\n" not in failed.error


async def test_other_sources_need_nix(executor, context):
    failed = await executor.run_eval(evaluation(".#hello", kind="flake"), context)
    assert failed.kind == "Permanent"
    assert "--executor nix" in failed.error


async def test_evaluation_can_be_stopped_and_timed_out(executor, context, tmp_path, monkeypatch):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # reading it blocks until somebody writes
    failed = await executor.run_eval(evaluation(fifo, timeout=1), context)
    assert failed.kind == "Timeout"
    with trio.move_on_after(0.2) as scope:
        await executor.run_eval(evaluation(fifo), context)
    assert scope.cancelled_caught
    with fifo.open("wb", buffering=0) as file:  # lets the abandoned readers end
        file.write(b"{}")


# -- settings ----------------------------------------------------------------------------


def config(tmp_path, **fields):
    return WorkerConfig(
        server="tcp://127.0.0.1:1", state_dir=tmp_path / "state", executor="process", **fields
    )


async def test_store_setting_is_a_directory_or_a_file_uri(tmp_path, context):
    for setting in (str(tmp_path / "shared"), f"file://{tmp_path}/shared"):
        executor = ProcessExecutor.of(config(tmp_path, store=setting))
        await trio.to_thread.run_sync(executor.start)
        await executor.run_build(job("echo > $out"), context)
        assert (tmp_path / "shared/p").exists()


async def test_own_store_lies_in_the_state_directory(tmp_path, context):
    executor = ProcessExecutor.of(config(tmp_path))
    executor.start()
    await executor.run_build(job("echo > $out"), context)
    assert (tmp_path / "state/store/p").exists()


async def test_store_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="needs a directory"):
        ProcessExecutor.of(config(tmp_path, store="ssh-ng://host"))


async def test_a_cluster_member_finds_its_cluster_and_its_socket(executor, store):
    context = Context()
    roster = [m.RosterEntry("lead", 0, "w1", primary=True)]
    sent = []

    async def send(signal):
        await trio.lowlevel.checkpoint()
        sent.append(signal)

    context.member = Member(m.ClusterSeat("t1", "lead", 0, 30.0), roster, send)
    context.member.deliver(Signal(m.MemberRef("helper", 1), b"the port"))
    code = (
        "import json,os,socket;s=socket.socket(socket.AF_UNIX);"
        "s.connect(os.environ['HEADRACE_SIGNAL_SOCKET']);f=s.makefile('rw');"
        "print(json.dumps({'payload':'mine'}),file=f,flush=True);"
        "open(os.environ['out'],'w').write("
        "json.loads(os.environ['HEADRACE_CLUSTER'])['role']+json.loads(f.readline())['payload'])"
    )
    member = job("unused", builder=sys.executable, args=["-c", code])
    assert isinstance(await executor.run_build(member, context), Built)
    assert store.entry("/nix/store/p").read_text() == "leadthe port"
    assert sent == [Signal(None, b"mine")]


def has_directory(file):
    return Path(file).parent.exists()


def member(send=None):
    async def nowhere(signal):
        await trio.lowlevel.checkpoint()

    roster = [m.RosterEntry("lead", 0, "w1", primary=True), m.RosterEntry("helper", 1, "w2", False)]
    return Member(m.ClusterSeat("t1", "lead", 0, 30.0), roster, send or nowhere)


async def test_a_stopped_member_leaves_no_process_and_no_socket(executor, store, tmp_path):
    context = Context()
    context.member = member()
    mark = tmp_path / "mark"
    script = (
        f"sleep 600 & echo $HEADRACE_SIGNAL_SOCKET $$ $! > {mark}.new; mv {mark}.new {mark}; wait"
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(executor.run_build, job(script), context)
        await until(mark.exists)
        nursery.cancel_scope.cancel()
    socket, *pids = mark.read_text().split()
    assert not has_directory(socket)
    await until(lambda: not any(is_running(int(pid)) for pid in pids))
    assert not store.is_valid("/nix/store/p")


async def test_signals_of_a_process_that_ends_at_once_are_sent(executor):
    context, sent = Context(), []

    async def send(signal):
        await trio.lowlevel.checkpoint()
        sent.append(signal.payload)

    context.member = member(send)
    for number in range(5):
        context.member.deliver(Signal(m.MemberRef("helper", 1), b"%d" % number))
    code = (
        "import os,socket;s=socket.socket(socket.AF_UNIX);"
        "s.connect(os.environ['HEADRACE_SIGNAL_SOCKET']);"
        "open(os.environ['out'],'w').close();"
        '[s.sendall(b\'{"payload":"%d"}\\n\'%n) for n in range(300)];os._exit(0)'
    )
    made = job("unused", builder=sys.executable, args=["-c", code])
    assert isinstance(await executor.run_build(made, context), Built)
    assert sent == [b"%d" % number for number in range(300)]


async def test_a_member_that_cannot_have_a_socket_may_be_tried_again(
    executor, monkeypatch, tmp_path
):
    monkeypatch.setattr(signals, "_place", lambda: tmp_path / "absent")
    context = Context()
    context.member = member()
    failed = await executor.run_build(job("true"), context)
    assert failed.kind == "Transient"
    assert "no socket" in failed.error


async def test_sockets_of_a_killed_worker_are_removed_at_the_next_start(executor, tmp_path):
    async with signals.offered(member(), tmp_path / "builds") as env:
        executor.start()
        assert not has_directory(env[signals.SOCKET])
