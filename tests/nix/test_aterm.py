"""`.drv` files: those of Nix, and any that could be."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.nix import aterm
from actors.nix.aterm import BadDerivation, DrvOutput, StoreDerivation
from tests.nix.real import build, needs_nix

TEXTS = st.binary(max_size=20).map(lambda data: data.decode(errors="surrogateescape"))
NAMES = st.sampled_from(["out", "dev", "a", "b"])
FIXED = """
    outputHashMode = "recursive";
    outputHash = "sha256-AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
"""
DERIVATIONS = st.builds(
    StoreDerivation,
    outputs=st.dictionaries(NAMES, st.builds(DrvOutput, TEXTS, TEXTS, TEXTS)),
    input_drvs=st.dictionaries(TEXTS, st.lists(NAMES, unique=True).map(sorted)),
    input_srcs=st.lists(TEXTS, unique=True).map(sorted),
    system=TEXTS,
    builder=TEXTS,
    args=st.lists(TEXTS),
    env=st.dictionaries(TEXTS, TEXTS),
)


@given(DERIVATIONS)
def test_what_is_written_is_read_back(drv):
    assert aterm.parse(aterm.unparse(drv)) == drv


@given(DERIVATIONS, st.data())
def test_a_file_that_is_cut_short_or_goes_on_is_refused(drv, data):
    whole = aterm.unparse(drv)
    at = data.draw(st.integers(0, len(whole) - 1))
    for broken in (whole[:at], whole + b"x"):
        with pytest.raises(BadDerivation):
            aterm.parse(broken)


def test_dynamic_derivations_are_refused_by_name():
    with pytest.raises(BadDerivation, match="dynamic derivations are not supported"):
        aterm.parse(b'DrvWithVersion("xp-dyn-drv",[')


@needs_nix
@pytest.mark.parametrize(
    "attributes",
    [
        'outputs = [ "out" "dev" ]; text = "quotes \\" and \\\\ and\\n\\r\\tblanks ";',
        FIXED,
        'source = builtins.toFile "source" "text";',
        "__structuredAttrs = true; list = [ 1 2 ];",
    ],
    ids=["escapes", "fixed", "source", "structured"],
)
def test_files_of_nix_are_read_and_written_byte_by_byte(chroot, attributes):
    store = chroot("w1")
    inner = build("inner", "echo > $out")
    expression = f"let inner = {inner}; in " + build("outer", "x", f"inherit inner; {attributes}")
    path = store.instantiate(expression)
    data = store.path(path).read_bytes()
    drv = aterm.parse(data)
    assert aterm.unparse(drv) == data
    told = json.loads(store.run("nix", "show-derivation", path).stdout)[path]
    assert (drv.system, drv.builder, drv.args) == (told["system"], told["builder"], told["args"])
    assert (drv.env, drv.input_srcs) == (told["env"], told["inputSrcs"])
    assert drv.input_drvs == told["inputDrvs"]
    assert {name: output.path for name, output in drv.outputs.items()} == {
        name: output["path"] for name, output in told["outputs"].items()
    }
