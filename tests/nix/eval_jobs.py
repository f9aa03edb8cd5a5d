"""A stand-in for nix-eval-jobs, which Debian does not have: the same options, the same lines.

Written after its README and sources. It evaluates with `nix-instantiate`, one attribute at a time.
Names that its model takes for indices or cannot quote are errors here, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

KIND = """
let call = v: if builtins.isFunction v then v {} else v;
    v = builtins.foldl' (x: n: call (call x).${n}) (call (import FILE)) (builtins.fromJSON PATH);
in if !(builtins.isAttrs v) then []
   else if (v.type or null) == "derivation" then "derivation"
   else if PATH == "[]" || (v.recurseForDerivations or false) then builtins.attrNames v
   else []
"""


def install(folder: Path) -> Path:
    """Makes a folder for PATH with the program in it."""
    folder.mkdir(exist_ok=True)
    program = folder / "nix-eval-jobs"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    program.chmod(0o755)
    return folder


def nix(options: argparse.Namespace, *arguments: str) -> str:
    store = [word for name, value in options.option for word in (f"--{name}", value)]
    done = subprocess.run(
        ["nix-instantiate", *store, *arguments], capture_output=True, text=True, check=False
    )
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise ValueError(done.stderr[done.stderr.index("error:") :])
    return done.stdout


def visit(options: argparse.Namespace, path: list[str]) -> None:
    said: dict[str, Any] = {"attr": ".".join(path), "attrPath": path}
    if any(name.isdigit() or '"' in name for name in path):
        print(json.dumps(said | {"error": f"error: {path[-1]!r} should be a list"}), flush=True)
        return
    try:
        file = str(Path(options.expr).absolute())
        kind = KIND.replace("FILE", file).replace("PATH", json.dumps(json.dumps(path)))
        found = json.loads(nix(options, "--eval", "--strict", "--json", "--expr", kind))
        if isinstance(found, list):
            for name in found:
                visit(options, [*path, name])
            return
        drv = nix(options, file, "-A", ".".join(path)).strip()
        said |= {"drvPath": drv, "name": drv[44:-4], "system": "s", "outputs": {"out": None}}
    except ValueError as error:
        said["error"] = str(error)
    print(json.dumps(said), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--option", nargs=2, action="append", default=[])
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--max-memory-size", type=int, default=4096)
    parser.add_argument("expr")
    visit(parser.parse_args(), [])


if __name__ == "__main__":
    main()
