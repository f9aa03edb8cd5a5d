"""Evaluations with the real Nix, alone and behind a stand-in for nix-eval-jobs."""

from __future__ import annotations

import json
import os
import sys

import psutil
import pytest

from actors.nix.settings import Nix
from actors.worker.executors.base import Evaluated, Failed
from actors.worker.executors.nix_eval import NixEvaluator
from tests.nix import eval_jobs
from tests.nix.real import needs_nix
from tests.worker.test_process_executor import Context
from transport import messages as m

pytestmark = needs_nix

PROJECT = """
let
  drv = name: deps: derivation {
    inherit name deps; system = "x86_64-linux"; builder = "/bin/sh"; args = [ ];
  };
  lib = drv "lib" [ ];
in {
  one = drv "one" [ lib ];
  two = builtins.trace "two is looked at" (drv "two" [ lib ]);
  broken = throw "nobody makes this";
  text = "no derivation";
  call = { x ? "called" }: drv x [ ];
  set = { a = drv "set-a" [ ]; deep.b = drv "set-b" [ ]; };
  "with space" = drv "spaced" [ ];
  "q\\"uote" = drv "quoted" [ ];
  "1" = drv "number" [ ];
  "dollar\\${x}" = drv "dollar" [ ];
  many = builtins.listToAttrs (builtins.genList (i: {
    name = "n${toString i}"; value = drv "many-${toString i}" [ ];
  }) 70);
}
"""


class EvalContext(Context):
    def __init__(self, known=()):
        super().__init__()
        self.all_known, self.asked = set(known), []

    async def known(self, drv_paths):
        self.asked += drv_paths
        return self.all_known & set(drv_paths)

    @property
    def told(self):
        return self.updates[-1]

    @property
    def batches(self):
        return [u.derivations for u in self.updates[1:] if u.derivations]

    @property
    def names(self):
        return sorted(d.name for batch in self.batches for d in batch)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "default.nix").write_text(PROJECT)
    return tmp_path


@pytest.fixture
def evaluator(tmp_path, nix_env):
    def of(memory_mb=0, program=None):
        env = dict(nix_env)
        if program is not None:
            folder = tmp_path / "bin"
            if program == "stand-in":
                eval_jobs.install(folder)
            else:
                folder.mkdir()
                (folder / "nix-eval-jobs").write_text(f"#!/bin/sh\n{program}\n")
                (folder / "nix-eval-jobs").chmod(0o755)
            env["PATH"] = f"{folder}:{env['PATH']}"
        nix = Nix(str(tmp_path / "store"))
        return NixEvaluator(nix, nix.environment(env), "x86_64-linux", memory_mb)

    return of


def evaluation(project, attributes, timeout=0):
    return m.EvalJob("default", m.EvalSource("nix-file", str(project)), attributes, timeout)


def answer(number, drv):
    """A line of nix-eval-jobs."""
    return json.dumps({"attr": f"a{number}", "attrPath": [f"a{number}"], "drvPath": drv})


def names_of(targets):
    return {attribute: path.partition("-")[2] for attribute, path in targets.items()}


@pytest.fixture(params=[None, "stand-in"])
def program(request):
    return request.param


async def test_what_is_asked_for_is_reported_with_all_it_needs(evaluator, project, program):
    context = EvalContext()
    asked = ["one", "two", "call", '"with space"', '"q\\"uote"', "1", '"dollar${x}"']
    done = await evaluator(program=program).run(evaluation(project, asked), context)
    assert isinstance(done, Evaluated), done
    assert names_of(context.told.targets) == {
        "one": "one.drv", "two": "two.drv", "call": "called.drv", '"with space"': "spaced.drv",
        '"q\\"uote"': "quoted.drv", '"1"': "number.drv", '"dollar\\${x}"': "dollar.drv",
    }  # fmt: skip
    assert context.told.errors == []
    assert "trace: two is looked at" in context.told.warnings
    assert context.names == [
        "called", "dollar", "lib", "number", "one", "quoted", "spaced", "two",
    ]  # fmt: skip


async def test_a_file_may_be_in_an_odd_place(evaluator, tmp_path, program):
    folder = tmp_path / """JOBS PATTERNS ROOT 'q' "d" ${x} ü"""
    folder.mkdir()
    (folder / "odd name.nix").write_text(PROJECT)
    context = EvalContext()
    done = await evaluator(program=program).run(
        evaluation(folder / "odd name.nix", ["one"]), context
    )
    assert isinstance(done, Evaluated), done
    assert names_of(context.told.targets) == {"one": "one.drv"}


async def test_attributes_may_be_thousands(evaluator, project):
    context = EvalContext()
    asked = [f"many.n{number % 70}" for number in range(10_000)]
    done = await evaluator().run(evaluation(project, asked), context)
    assert isinstance(done, Evaluated), done
    assert len(context.told.targets) == 70


async def test_an_error_of_one_attribute_leaves_the_others_alone(evaluator, project, program):
    context = EvalContext()
    asked = ["one", "broken", "text", "nosuch", "two"]
    done = await evaluator(program=program).run(evaluation(project, asked), context)
    assert isinstance(done, Evaluated), done
    assert names_of(context.told.targets) == {"one": "one.drv", "two": "two.drv"}
    broken, text, missing = context.told.errors
    assert broken == "broken: nobody makes this"
    assert "does not evaluate to a derivation" in text
    assert missing.startswith("nosuch: attribute 'nosuch'")
    assert context.names == ["lib", "one", "two"]


async def test_a_set_stands_for_what_is_in_it(evaluator, project, program):
    context = EvalContext()
    done = await evaluator(program=program).run(evaluation(project, ["set"]), context)
    assert isinstance(done, Evaluated), done
    assert [*names_of(context.told.targets).values()] == ["set-a.drv"]


async def test_nothing_but_errors_fails(evaluator, project, program):
    context = EvalContext()
    done = await evaluator(program=program).run(evaluation(project, ["broken"]), context)
    assert done == Failed("Permanent", "broken: nobody makes this", spans=done.spans)


async def test_known_derivations_are_not_walked_into(evaluator, project, program):
    first, second = EvalContext(), EvalContext()
    made = evaluator(program=program)
    await made.run(evaluation(project, ["one"]), first)
    second.all_known = set(first.told.targets.values())
    await made.run(evaluation(project, ["one", "two"]), second)
    assert second.names == ["lib", "two"]
    assert len(second.told.targets) == 2


async def test_derivations_come_in_batches_of_50(evaluator, project):
    context = EvalContext()
    await evaluator().run(evaluation(project, ["many"]), context)
    assert [len(batch) for batch in context.batches] == [50, 20]


async def test_time_is_limited(evaluator, project):
    mark = f"30.{os.getpid()}"
    done = await evaluator(program=f"exec sleep {mark}").run(
        evaluation(project, ["one"], timeout=1), EvalContext()
    )
    assert done.kind == "Timeout"
    assert not [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]


async def test_memory_is_limited(evaluator, project):
    hungry = f"exec {sys.executable} -c 'x = b\"x\" * 2**28; import time; time.sleep(30)'"
    done = await evaluator(memory_mb=200, program=hungry).run(
        evaluation(project, ["one"]), EvalContext()
    )
    assert done.kind == "Permanent"
    assert done.error == "the evaluation took more than 200 MiB of memory"


async def test_what_nix_eval_jobs_has_no_answer_for_is_evaluated_without_it(evaluator, project):
    """It dies in the middle: after one answer, and in the middle of a set."""
    context = EvalContext()
    made = evaluator()
    await made.run(evaluation(project, ["one"]), context)
    drv = context.told.targets["one"]
    part = '{"attr": "a1.a", "attrPath": ["a1", "a"], "error": "error: half"}'
    program = f"echo '{answer(0, drv)}'; echo '{part}'; echo nonsense; printf '{{\"attr'; exit 1"
    context = EvalContext()
    done = await evaluator(program=program).run(
        evaluation(project, ["one", "set", "two", "broken"]), context
    )
    assert isinstance(done, Evaluated), done
    assert sorted(names_of(context.told.targets).values()) == ["one.drv", "set-a.drv", "two.drv"]
    assert context.told.errors == ["broken: nobody makes this"]
    assert context.names == ["lib", "one", "set-a", "two"]


async def test_what_it_finds_is_reported_while_it_still_runs(evaluator, project, tmp_path):
    context = EvalContext()
    await evaluator().run(evaluation(project, ["one"]), context)
    drv = context.told.targets["one"]
    go_on = tmp_path / "go-on"
    program = f"echo '{answer(0, drv)}'; until [ -e {go_on} ]; do sleep 0.05; done"

    class Watching(EvalContext):
        async def update(self, update):
            await super().update(update)
            if self.names == ["lib", "one"]:
                go_on.touch()

    context = Watching()
    done = await evaluator(program=program).run(evaluation(project, ["one"], 20), context)
    assert isinstance(done, Evaluated), done
    assert context.names == ["lib", "one"]


async def test_a_drv_that_is_not_there_fails_in_one_line(evaluator, project):
    gone = f"/nix/store/{'0' * 32}-gone.drv"
    done = await evaluator(program=f"echo '{answer(0, gone)}'").run(
        evaluation(project, ["one"], 20), EvalContext()
    )
    assert done == Failed(
        "Permanent", f"one: cannot read {gone}: No such file or directory", spans=done.spans
    )


async def test_what_is_not_supported_leaves_the_others_alone(evaluator, project, nix_env, program):
    """A content-addressed derivation, and one that needs it."""
    nix_env["NIX_CONFIG"] += "extra-experimental-features = ca-derivations\n"
    expression = PROJECT.replace(
        "in {",
        """
  floating = derivation {
    name = "floating"; system = "x86_64-linux"; builder = "/bin/sh";
    __contentAddressed = true; outputHashMode = "recursive"; outputHashAlgo = "sha256";
  };
in {
  inherit floating;
  needs = drv "needs" [ floating ];
""",
        1,
    )
    (project / "default.nix").write_text(expression)
    context = EvalContext()
    done = await evaluator(program=program).run(
        evaluation(project, ["one", "floating", "needs", "two"]), context
    )
    assert isinstance(done, Evaluated), done
    assert names_of(context.told.targets) == {"one": "one.drv", "two": "two.drv"}
    floating, needs = context.told.errors
    assert floating.startswith("floating: ")
    assert needs.startswith("needs: ")
    assert context.names == ["lib", "one", "two"]
