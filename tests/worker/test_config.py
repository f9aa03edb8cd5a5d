from __future__ import annotations

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.worker.config import (
    ConfigError,
    WorkerConfig,
    parse_list,
    parse_peers,
    read_peers,
    worker_id,
)


def config(tmp_path, **fields):
    given = {"server": "tcp://127.0.0.1:1", "state_dir": tmp_path / "state"}
    return WorkerConfig(**(given | {"executor": "process"} | fields))


# -- the id ------------------------------------------------------------------------------


def test_fresh_directory_gets_an_id_that_stays(tmp_path):  # 17
    first = worker_id(config(tmp_path))
    assert worker_id(config(tmp_path)) == first
    file = tmp_path / "state/worker-id"
    assert file.read_text().strip() == first
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in file.parent.iterdir()] == ["worker-id"]


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"a\nb\n", b"\xff\xfe", b"x" * 201, b"tab\there\n", b" padded \n"]
)
def test_invalid_id_file_is_named_and_left_alone(tmp_path, content):  # 17
    file = tmp_path / "state/worker-id"
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="worker-id"):
        worker_id(config(tmp_path))
    assert file.read_bytes() == content


def test_id_by_hand_is_taken(tmp_path):
    file = tmp_path / "state/worker-id"
    file.parent.mkdir()
    file.write_text("builder-7\n")
    assert worker_id(config(tmp_path)) == "builder-7"


def test_configured_id_wins_and_is_not_kept(tmp_path):
    assert worker_id(config(tmp_path, id="w9")) == "w9"
    assert not (tmp_path / "state").exists()


def test_state_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(ConfigError, match="cannot use"):
        worker_id(config(tmp_path))


# -- peers -------------------------------------------------------------------------------


def test_bad_lines_are_ignored_and_the_others_used(tmp_path):  # 15
    file = tmp_path / "peers"
    file.write_text(
        "# peers of this worker\n\n  \na:token-a\nno colon\nb:\nc:" + "x" * 1025 + "\n"
        "#d:token-d\n:token\ne:two words\n*:token-for-all\nf: token-f \r\ng:with:colons\n"
    )
    assert read_peers(file) == {
        "a": "token-a", "*": "token-for-all", "f": "token-f", "g": "with:colons",
    }  # fmt: skip


def test_no_peers_file_is_no_token():
    assert read_peers(None) == {}


def test_unreadable_peers_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="peers file"):
        read_peers(tmp_path / "none")


@given(st.text())
def test_any_peers_file_can_be_read(text):
    for peer, token in parse_peers(text).items():
        assert 1 <= len(peer) <= 200
        assert 1 <= len(token) <= 1024


# -- the rest ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b", ("a", "b")),
        ("a b", ("a", "b")),
        (" a, b ,,a\n", ("a", "b")),
        ("", ()),
    ],
)
def test_parse_list(text, expected):
    assert parse_list(text) == expected


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"build_max_concurrent": -1}, "--build-max-concurrent"),
        ({"build_max_concurrent": 0, "eval_max_concurrent": 0}, "both"),
        ({"id": ""}, "--id"),
        ({"id": "a\nb"}, "--id"),
        ({"name": "x" * 201}, "--name"),
        ({"cpu_core_score": 0.0}, "core score"),
        ({"cpu_core_score": float("nan")}, "core score"),
        ({"cache": "file:///c"}, "--cache"),
    ],
)
def test_settings_that_cannot_be_used(tmp_path, fields, text):
    with pytest.raises(ConfigError, match=text) as caught:
        config(tmp_path, **fields)
    assert "\n" not in str(caught.value)
