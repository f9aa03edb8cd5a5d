"""Derivations as Nix prints them, in every layout that `nix derivation show -r` has had.

| Nix | top level | paths | inputs |
|---|---|---|---|
| up to 2.14 | path -> derivation, no `name` | full | `inputSrcs`, `inputDrvs {path: [output]}` |
| 2.15 | and `name` | full | the same |
| 2.18 | the same | full | `inputDrvs {path: {outputs, dynamicOutputs}}` |
| 2.32 | and `version: 3` in each derivation | base names | the same |
| 2.33 | `{version: 4, derivations: {...}}` | base names | `inputs: {srcs, drvs}` |

Layouts are told apart by these fields, not by a version: older ones carry none.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from actors.graph.fields import convert, kind
from actors.graph.order import BadGraph, shown
from actors.graph.storepath import fixed_output_path
from actors.nix.aterm import StoreDerivation
from transport.messages import LongText, SubmittedJob, Text

DEFAULT_STORE = "/nix/store"
NEWEST_LAYOUT = 4
MAX_ATTRS_BYTES = 2**20  # they travel as a value of `env`


class _Wanted(Struct, rename="camel"):
    outputs: list[Text]
    dynamic_outputs: dict[str, Any] = {}


class _Inputs(Struct):
    srcs: list[Text] = []
    drvs: dict[Text, list[Text] | _Wanted] = {}


class _Output(Struct, rename="camel"):
    path: Text | None = None
    hash: str | None = None
    hash_algo: str | None = None
    method: str | None = None


class _Derivation(Struct, rename="camel"):
    system: Text
    outputs: dict[Text, _Output]
    name: Text | None = None
    version: int | None = None
    input_srcs: list[Text] = []
    input_drvs: dict[Text, list[Text] | _Wanted] = {}
    inputs: _Inputs | None = None
    builder: Text | None = None
    args: list[LongText] = []
    env: dict[Text, LongText] = {}
    structured_attrs: dict[str, Any] | None = None


def read_derivations(top: dict[str, Any]) -> list[SubmittedJob]:
    """A build for each derivation of a decoded file, in the file's order.

    Raises:
        BadGraph: an entry is no derivation, or its output paths cannot be known.
    """
    entries = top
    if "derivations" in top:
        _check_version(top.get("version"), "the file")
        entries = top["derivations"]
        if not isinstance(entries, dict):
            raise BadGraph(f"field `derivations` is {kind(entries)}, not an object")
        if not entries:
            raise BadGraph("field `derivations` is empty; nothing to submit")
    for key in entries:
        if not key.endswith(".drv"):
            raise BadGraph(
                f"`{shown(key)}` is not a derivation (<hash>-<name>.drv) and not one of jobs, "
                "evaluations, clusters; give the JSON of `nix derivation show -r`"
            )
    return [_job(key, entry) for key, entry in entries.items()]


def as_job(drv_path: str, drv: StoreDerivation) -> SubmittedJob:
    """A `.drv` file as a build. Raises `BadGraph`."""
    outputs = {
        name: {"path": o.path or None, "hashAlgo": o.hash_algorithm or None, "hash": o.hash or None}
        for name, o in drv.outputs.items()
    }
    return _job(
        drv_path,
        {
            "outputs": outputs, "inputSrcs": drv.input_srcs, "inputDrvs": drv.input_drvs,
            "system": drv.system, "builder": drv.builder, "args": drv.args, "env": drv.env,
        },
    )  # fmt: skip


def _check_version(version: Any, where: str) -> None:
    if isinstance(version, int) and version > NEWEST_LAYOUT:
        raise BadGraph(
            f"{where}: field `version` is {version}, newer than the layouts read here (up to "
            f"{NEWEST_LAYOUT}); print the graph with an older Nix or take a newer headrace"
        )


def _job(key: str, entry: Any) -> SubmittedJob:
    drv_path = _absolute(key)
    where = shown(drv_path)
    drv = convert(entry, _Derivation, where)
    _check_version(drv.version, where)
    inputs = drv.inputs or _Inputs(drv.input_srcs, drv.input_drvs)
    attrs = _structured_attrs(drv, where)
    name = drv.name or _name(drv_path)
    return SubmittedJob(
        drv_path=drv_path,
        name=name,
        system=drv.system,
        required_features=_features(drv, attrs, where),
        outputs=_outputs(drv, name, drv_path),
        input_drvs=[_input(path, wanted, where) for path, wanted in inputs.drvs.items()],
        input_srcs=[_absolute(path) for path in inputs.srcs],
        pname=_pname(drv, attrs),
        is_fixed_output=any(o.hash is not None for o in drv.outputs.values()) or None,
        prefer_local_build=_is_set("preferLocalBuild", drv, attrs) or None,
        builder=drv.builder,
        args=drv.args,
        env=_env(drv, where),
    )


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{DEFAULT_STORE}/{path}"


def _name(drv_path: str) -> str:
    """`/nix/store/<32 characters>-hello-2.10.drv` is named `hello-2.10`."""
    base = drv_path.rpartition("/")[2].removesuffix(".drv")
    return base[33:] if base[32:33] == "-" else base


def _input(path: str, wanted: list[str] | _Wanted, where: str) -> str:
    if isinstance(wanted, _Wanted) and wanted.dynamic_outputs:
        raise BadGraph(
            f"{where}: field `dynamicOutputs` of input {shown(path)}: derivations that are "
            "made by builds cannot be scheduled; evaluate without dynamic-derivations"
        )
    return _absolute(path)


def _outputs(drv: _Derivation, name: str, drv_path: str) -> dict[str, str]:
    where = shown(drv_path)
    if not drv.outputs:
        raise BadGraph(f"{where}: field `outputs` is empty; a build makes at least one")
    paths = {}
    for output, made in drv.outputs.items():
        field = f"outputs.{shown(output)}"
        if made.path is not None:
            paths[output] = _absolute(made.path)
        elif made.hash is not None:
            store = drv_path.rpartition("/")[0]
            try:
                paths[output] = fixed_output_path(
                    store, name, made.hash, made.hash_algo, made.method
                )
            except ValueError as error:
                raise BadGraph(f"{where}: field `{field}.hash`: {error}") from None
        else:
            raise BadGraph(
                f"{where}: field `{field}.path` is missing: the output path of a floating "
                "content-addressed derivation is known only once it is built; evaluate with "
                "fixed output paths (without __contentAddressed)"
            )
    return paths


# -- what derivations say in their environment -----------------------------------------------


def _structured_attrs(drv: _Derivation, where: str) -> dict[str, Any]:
    if drv.structured_attrs is not None:
        return drv.structured_attrs
    text = drv.env.get("__json")
    if text is None:
        return {}
    try:
        attrs = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadGraph(f"{where}: field `env.__json` is not valid JSON: {error}") from None
    if not isinstance(attrs, dict):
        raise BadGraph(f"{where}: field `env.__json` holds {kind(attrs)}, not an object")
    return attrs


def _features(drv: _Derivation, attrs: dict[str, Any], where: str) -> list[str]:
    field = "requiredSystemFeatures"
    value = attrs[field] if field in attrs else drv.env.get(field, "")
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise BadGraph(f"{where}: field `{field}` is {kind(value)}, not a list of texts")
    return list(dict.fromkeys(words))


def _pname(drv: _Derivation, attrs: dict[str, Any]) -> str | None:
    value = attrs.get("pname", drv.env.get("pname"))
    return value if isinstance(value, str) and value else None


def _is_set(field: str, drv: _Derivation, attrs: dict[str, Any]) -> bool:
    return attrs.get(field) is True if field in attrs else drv.env.get(field) == "1"


def _env(drv: _Derivation, where: str) -> dict[str, str]:
    """Nix hands structured attributes to the builder as `__json`; so do we."""
    if drv.structured_attrs is None or "__json" in drv.env:
        return drv.env
    text = msgspec.json.encode(drv.structured_attrs)
    if len(text) > MAX_ATTRS_BYTES:
        raise BadGraph(
            f"{where}: field `structuredAttrs` is larger than {MAX_ATTRS_BYTES} bytes; pass "
            "large data in a file"
        )
    return {**drv.env, "__json": text.decode()}
