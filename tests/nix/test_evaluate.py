"""What attributes mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.nix import evaluate
from actors.nix.evaluate import BadAttribute, joined, split


@pytest.mark.parametrize(
    ("attribute", "path"),
    [
        ("hello", ("hello",)),
        ("a.b.c", ("a", "b", "c")),
        ('a."b.c".d', ("a", "b.c", "d")),
        ("packages.*", ("packages", "*")),
        ("x-y_z'.1", ("x-y_z'", "1")),
        (r'a."b\"c\\"', ("a", 'b"c\\')),
    ],
)
def test_an_attribute_is_a_path_of_names(attribute: str, path: tuple[str, ...]) -> None:
    assert split(attribute) == path


@pytest.mark.parametrize("attribute", ["", ".", "a.", "a..b", ".a", 'a"b', '"a'])
def test_what_is_no_path_is_said(attribute: str) -> None:
    with pytest.raises(BadAttribute):
        split(attribute)


names = st.text(
    st.characters(blacklist_characters='"\\$', blacklist_categories=("Cs",)), min_size=1
)


@given(st.lists(names, min_size=1, max_size=4))
def test_names_are_quoted_where_nix_wants_it(path: list[str]) -> None:
    assert split(joined(path)) == tuple(path)


def test_a_file_must_be_there(tmp_path) -> None:
    with pytest.raises(BadAttribute, match="shared path"):
        evaluate.nix_file(str(tmp_path / "none.nix"))
    with pytest.raises(BadAttribute, match="absolute"):
        evaluate.nix_file("default.nix")
    with pytest.raises(BadAttribute, match="File name too long"):
        evaluate.nix_file("/" + "x" * 300)
    with pytest.raises(BadAttribute, match="null byte"):
        evaluate.nix_file("/x\0y")


def test_what_nix_says_is_taken_apart() -> None:
    log = (
        b"warning: Git tree '/x' is dirty\ntrace: hey\n"
        b"warning: you did not specify '--add-root'; x\n"
        b"\x1b[35;1mevaluation warning:\x1b[0m old\nerror: first\n\n       \xe2\x80\xa6 while\n"
    )
    warnings, error = evaluate.messages(log)
    assert warnings == ["trace: hey", "evaluation warning: old"]
    assert error == "first \u2026 while"


def test_one_of_the_outputs_names_its_derivation() -> None:
    output = b"/nix/store/a.drv\n/nix/store/b.drv!dev\n"
    assert evaluate.instantiated(output) == ["/nix/store/a.drv", "/nix/store/b.drv"]
    with pytest.raises(BadAttribute):
        evaluate.expanded(b"nonsense")
