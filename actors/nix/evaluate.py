"""Evaluating a Nix file or flake: which attributes are meant, and the commands that say it.

Two steps. `names` lists the attribute paths that a pattern stands for, without forcing more than
names need; `jobs` is the expression of what stands there, which `instantiate` or nix-eval-jobs turn
into `.drv` files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from actors.nix.settings import plain

FILE = "jobs.nix"
MAX_ATTRIBUTES = 10_000
_SIMPLE = re.compile(r"[A-Za-z_][A-Za-z0-9_'-]*")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ADVICE = re.compile(r" ?\(use '--show-trace' to [^)]*\)")
_WARNINGS = ("warning:", "evaluation warning:", "trace:")
_NOISE = ("you did not specify '--add-root'", "Git tree")

_EXPAND = """
let
  call = v: if builtins.isFunction v then v {} else v;
  isSet = v: let r = builtins.tryEval (builtins.isAttrs v); in r.success && r.value;
  isDrv = v: (v.type or null) == "derivation";
  isWanted = v: let r = builtins.tryEval (isDrv v || (v.recurseForDerivations or false)); in
    !r.success || r.value;
  isBroken = v: !(builtins.tryEval (builtins.isAttrs v)).success;
  expand = v0: p:
    let v = call v0; name = builtins.head p; rest = builtins.tail p; in
    if p == [] then [ [] ]
    else if name == "*" then
      if !(isSet v) then [ p ]
      else builtins.concatMap (n:
        let x = v.${n}; in
        if isBroken x then [ ([ n ] ++ rest) ]
        else if !(builtins.isAttrs x) && !(builtins.isFunction x && rest != []) then []
        else if rest == [] then (if isWanted x then [ [ n ] ] else [])
        else map (more: [ n ] ++ more) (expand x rest)
      ) (builtins.attrNames v)
    else if isSet v && v ? ${name} && rest != [] then
      map (more: [ name ] ++ more) (expand v.${name} rest)
    else [ p ];
  choose = v0: tries:
    let
      v = call v0;
      has = x: p: p == [] || builtins.head p == "*" || (isSet x && x ? ${builtins.head p}
        && has (call x.${builtins.head p}) (builtins.tail p));
      found = builtins.filter (has v) tries;
    in if found == [] then builtins.head tries else builtins.head found;
  root = ROOT;
in map (tries: expand root (choose root tries)) (builtins.fromJSON PATTERNS)
"""

_JOBS = """
let
  call = v: if builtins.isFunction v then v {} else v;
  isPlace = v: n: builtins.isList v && builtins.match "[0-9]{1,9}" n != null
    && builtins.fromJSON n < builtins.length v;
  get = text: v0: p:
    let v = call v0; n = builtins.head p; rest = builtins.tail p; in
    if p == [] then v
    else if builtins.isAttrs v && v ? ${n} then get text v.${n} rest
    else if isPlace v n then get text (builtins.elemAt v (builtins.fromJSON n)) rest
    else throw "attribute '${n}' in selection path '${text}' not found";
  item = list: i: { name = "item${toString i}"; value = builtins.elemAt list i; };
  set = list: builtins.listToAttrs (builtins.genList (item list) (builtins.length list));
  open = v:
    if builtins.isList v then open (set v)
    else if !(builtins.isAttrs v)
      then throw "expression does not evaluate to a derivation (or a set or list of those)"
    else if (v.type or null) == "derivation" then v
    else v // { recurseForDerivations = true; };
  root = ROOT;
  job = name: asked: open (get asked.text root asked.path);
in builtins.mapAttrs job (builtins.fromJSON JOBS)
"""


class BadAttribute(ValueError):
    """An attribute cannot be meant; the text is one line."""


class Source(Struct, frozen=True):
    """What is evaluated, as a Nix expression."""

    expression: str
    defaults: tuple[tuple[str, ...], ...]
    """Attribute paths that stand for 'none given', the first that exists; () = all of it."""
    prefixes: tuple[tuple[str, ...], ...] = ((),)
    """Where an attribute is looked for, first come."""


def nix_file(ref: str) -> Source:
    """A file, or a directory with a default.nix. Raises `BadAttribute`."""
    path = Path(ref)
    if not path.is_absolute():
        raise BadAttribute(f"the Nix file {ref!r} must be an absolute path")
    try:
        path.stat()
    except FileNotFoundError:
        raise BadAttribute(
            f"there is no {ref} on this worker: it must be on a shared path"
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadAttribute(f"cannot read {ref!r} on this worker: {why}") from None
    return Source(f"import {quoted(str(path))}", ((),))


def flake(ref: str, system: str) -> Source:
    """A flake reference without a fragment."""
    prefixes = (("packages", system), ("legacyPackages", system), ("checks", system), ())
    defaults = (("packages", system, "default"), ("defaultPackage", system))
    return Source(f"builtins.getFlake {quoted(ref)}", defaults, prefixes)


def split(attribute: str) -> tuple[str, ...]:
    """`a."b.c".*` as names. Raises `BadAttribute`."""
    names, rest = [], attribute
    while rest:
        match = re.match(r'(?:"((?:[^"\\]|\\.)*)"|([^".]+))(?:\.(?=.)|$)', rest)
        if match is None:
            raise BadAttribute(f"attribute {attribute!r} is not a path of names")
        names.append(match[2] if match[1] is None else _ESCAPED.sub(r"\1", match[1]))
        rest = rest[match.end() :]
    if not names:
        raise BadAttribute("an attribute is empty")
    return tuple(names)


def joined(path: Sequence[str]) -> str:
    """The attribute path as Nix reads it."""
    return ".".join(n if _SIMPLE.fullmatch(n) else quoted(n) for n in path)


def names(source: Source, attributes: Sequence[str]) -> str:
    """The text of `FILE` that says, for each attribute, the paths it stands for."""
    if attributes:
        tries = [[[*prefix, *split(a)] for prefix in source.prefixes] for a in attributes]
    else:
        tries = [[list(path) for path in source.defaults]]
    # The first ROOT is ours, whatever stands in the patterns.
    text = _EXPAND.replace("PATTERNS", quoted(json.dumps(tries)), 1)
    return text.replace("ROOT", source.expression, 1)


EXPAND = ("--eval", "--strict", "--json", FILE)
"""Arguments of `nix-instantiate` that print it."""


def expanded(output: bytes) -> list[tuple[str, ...]]:
    """The attribute paths that `EXPAND` printed, without repetitions. Raises `BadAttribute`."""
    try:
        groups: list[list[list[str]]] = json.loads(output)
    except ValueError:
        raise BadAttribute("Nix did not print the attributes") from None
    paths = list(dict.fromkeys(tuple(path) for group in groups for path in group))
    if len(paths) > MAX_ATTRIBUTES:
        raise BadAttribute(f"{len(paths)} attributes are meant: at most {MAX_ATTRIBUTES} are taken")
    return paths


def jobs(source: Source, paths: Sequence[Sequence[str]]) -> str:
    """The text of `FILE`: a set whose attribute `a7` is what stands at the path number 7.

    Evaluators do not take all names as they are: to them a number is an index, and a quote ends a
    name. These they never see.
    """
    asked = {
        f"a{number}": {"path": path, "text": joined(path)} for number, path in enumerate(paths)
    }
    text = _JOBS.replace("JOBS", quoted(json.dumps(asked)), 1)
    return text.replace("ROOT", source.expression, 1)


def instantiate(numbers: Sequence[int]) -> list[str]:
    """Arguments of `nix-instantiate` that make the `.drv` files of some of these."""
    return [FILE, *(word for number in numbers for word in ("-A", f"a{number}"))]


def instantiated(output: bytes) -> list[str]:
    """The drv paths printed; `x.drv!dev` names a derivation, too."""
    return [line.partition("!")[0] for line in output.decode(errors="replace").split()]


def messages(log: bytes) -> tuple[list[str], str]:
    """What Nix said on standard error: warnings, and the error with all its lines in one."""
    warnings: list[str] = []
    error: list[str] = []
    for raw in log.decode(errors="replace").splitlines():
        line = plain(raw)
        if error or line.startswith("error:"):
            error.append(line)
        elif _is_warning(line):
            warnings.append(line)
    return warnings, _ADVICE.sub("", plain(" ".join(error))).removeprefix("error: ")


def warnings_among(log: bytes) -> list[str]:
    """The warnings where errors may stand between them."""
    return [line for line in map(plain, log.decode(errors="replace").splitlines())
            if _is_warning(line)]  # fmt: skip


def _is_warning(line: str) -> bool:
    return line.startswith(_WARNINGS) and not any(noise in line for noise in _NOISE)


def quoted(text: str) -> str:
    """A string as it stands in a Nix expression."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("${", "\\${")
    return f'"{escaped}"'
