"""What a build job says, as a derivation that a Nix store can build from paths alone."""

from __future__ import annotations

import re

import msgspec

from actors.nix.aterm import DrvOutput
from actors.nix.hashes import BadHash, to_hex
from actors.nix.serve import BasicDerivation
from actors.worker.executors.spec import BadSpec, BuildSpec, build_spec
from transport import messages as m

_MODES = {"": "", "flat": "", "recursive": "r:", "nar": "r:", "text": "text:", "git": "git:"}
_UNKNOWN = f"sha256:{bytes(32).hex()}"


def basic_derivation(job: m.BuildJob) -> BasicDerivation | None:
    """None when the job does not say how it is built: then its `.drv` must.

    Raises `BadSpec` for a derivation that this way of building does not support.
    """
    spec = build_spec(job)
    if not job.outputs:
        raise BadSpec("the job names no outputs")
    if not spec.builder:
        return None
    return BasicDerivation(
        drv_path=job.drv_path,
        outputs=_outputs(job, spec),
        input_paths=[required.path for required in job.required_paths],
        system=job.requirement.system,
        builder=spec.builder,
        args=spec.args,
        env=spec.env,
    )


def assumed_inputs(job: m.BuildJob) -> list[str]:
    """Store paths that the derivation may need although the server does not name them.

    That happens to jobs submitted with inputs assumed built: the server does not know what these
    made, but their paths stand somewhere in the text of the derivation that uses them.
    """
    spec = build_spec(job)
    named = {required.path for required in job.required_paths}
    if len(named) >= len(set(spec.input_drvs)) + len(set(spec.input_srcs)):
        return []
    store = job.drv_path.rpartition("/")[0]
    path = re.compile(re.escape(store) + r"/[0-9a-z]{32}-[0-9A-Za-z+\-._?=]+")
    found = dict.fromkeys(path.findall("\n".join((*spec.args, *spec.env.values()))))
    own = {*named, *job.outputs.values()}
    return [p for p in found if p not in own and not p.endswith(".drv")]


def _outputs(job: m.BuildJob, spec: BuildSpec) -> dict[str, DrvOutput]:
    attrs = _attributes(spec)
    for unsupported in ("__contentAddressed", "__impure"):
        if attrs.get(unsupported) in (True, "1"):
            raise BadSpec(f"{unsupported} derivations are not supported: give it fixed outputs")
    digest = attrs.get("outputHash")
    if not isinstance(digest, str):
        return {name: DrvOutput(path) for name, path in job.outputs.items()}
    try:
        # To Nix an empty one is a hash that is not known yet: what the mismatch then says.
        algorithm, hexadecimal = to_hex(digest or _UNKNOWN, _text(attrs, "outputHashAlgo"))
        mode = _MODES[_text(attrs, "outputHashMode")]
    except BadHash as error:
        raise BadSpec(f"outputHash: {error}") from None
    except KeyError as error:
        raise BadSpec(f"outputHashMode {error} is not known") from None
    if list(job.outputs) != ["out"]:
        raise BadSpec("a fixed output is the only one, and named out")
    return {"out": DrvOutput(job.outputs["out"], f"{mode}{algorithm}", hexadecimal)}


def _attributes(spec: BuildSpec) -> dict[str, object]:
    """Attributes proper; those of a structured derivation are in `__json`."""
    structured = spec.env.get("__json")
    if structured is None:
        return dict(spec.env)
    try:
        return msgspec.json.decode(structured, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadSpec(f"env.__json is not valid JSON: {error}") from None


def _text(attrs: dict[str, object], name: str) -> str:
    value = attrs.get(name)
    return value if isinstance(value, str) else ""
