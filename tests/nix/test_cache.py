"""Looking into a binary cache: entries, sizes, and what is not there."""

from __future__ import annotations

import hashlib

import pytest

from actors.nix import narinfo
from actors.nix.cache import CacheFailed, entry, holds, open_cache
from actors.nix.hashes import to_nix32
from actors.nix.narinfo import BadNarInfo
from actors.worker.executors.nix_sizes import CacheSizes
from tests.nix.real import build, needs_nix
from tests.nix.webcache import WebCache

PATH = "/nix/store/wz3gf9xa7c2kq5nrvm4d1pjhs0yb6l8i-hello-2.10"
FILE_HASH = "0593r8argg5rycvnhxgrgl3c7b7pwk498802a4lawbkwm8hma5nn"
ENTRY = f"""StorePath: {PATH}
URL: nar/abc.nar.xz
Compression: xz
FileHash: sha256:{FILE_HASH}
FileSize: 4
NarHash: sha256:1xmr8jicvzszfzpz46g37mlpvbzjl2wpwvl2b05psipssyp1sm8h
NarSize: 196040
References: aaa-glibc wz3gf9xa7c2kq5nrvm4d1pjhs0yb6l8i-hello-2.10
Deriver: bbb-hello-2.10.drv
Sig: cache-1:abc==
Sig: other:def==
"""


def test_an_entry_is_read_with_all_it_says():
    found = narinfo.parse(ENTRY)
    assert found.store_path == PATH
    assert (found.nar_size, found.file_size, found.compression) == (196040, 4, "xz")
    assert found.references == ("aaa-glibc", PATH.rpartition("/")[2])
    assert found.deriver == "bbb-hello-2.10.drv"
    assert found.signatures == ("cache-1:abc==", "other:def==")
    assert found.ca is None


def test_what_may_be_absent_may_be():
    needed = f"StorePath: {PATH}\nURL: x\nNarHash: sha256:1\nNarSize: 0\n"
    found = narinfo.parse(f"{needed}References: \nDeriver: unknown-deriver\n")
    assert (found.compression, found.references, found.deriver) == ("bzip2", (), None)
    assert found.file_size is None


def test_fields_that_are_not_known_may_be_there_twice():
    assert narinfo.parse(f"{ENTRY}New: 1\nNew: 2\n") == narinfo.parse(ENTRY)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no StorePath"),
        (ENTRY.replace("NarSize: 196040", "NarSize: many"), "NarSize is 'many'"),
        (ENTRY.replace("NarSize: 196040", "NarSize: -1"), "NarSize is '-1'"),
        (ENTRY.replace("FileSize: 4", f"FileSize: {2**63}"), "FileSize is"),
        (ENTRY + "URL: again\n", "URL is there twice"),
        ("<html>not found", "a line without a field"),
    ],
)
def test_what_is_no_entry_is_refused(text, complaint):
    with pytest.raises(BadNarInfo, match=complaint):
        narinfo.parse(text)


@pytest.fixture(params=["file", "http"])
def place(request, tmp_path):
    folder = tmp_path / "cache"
    if request.param == "file":
        folder.mkdir()
        yield folder, f"file://{folder}?compression=none"
    else:
        with WebCache(folder) as web:
            yield folder, web.url


def test_a_path_is_held_if_the_file_of_its_entry_is_whole(place):
    folder, uri = place
    cache = open_cache(uri)
    assert entry(cache, PATH) is None
    assert not holds(cache, PATH)
    (folder / narinfo.name_of(PATH)).write_text(ENTRY)
    assert entry(cache, PATH).nar_size == 196040
    assert not holds(cache, PATH)
    file = folder / "whole"
    file.write_bytes(b"1234")
    cache.put("nar/abc.nar.xz", file)
    assert holds(cache, PATH)
    assert not holds(cache, PATH, thoroughly=True)
    digest = to_nix32(hashlib.sha256(b"1234").digest())
    (folder / narinfo.name_of(PATH)).write_text(ENTRY.replace(FILE_HASH, digest))
    assert holds(cache, PATH, thoroughly=True)
    (folder / "nar/abc.nar.xz").write_bytes(b"1235")
    assert holds(cache, PATH)
    assert not holds(cache, PATH, thoroughly=True)
    (folder / "nar/abc.nar.xz").write_bytes(b"123")
    assert not holds(cache, PATH)
    (folder / narinfo.name_of(PATH)).write_text(ENTRY.replace("FileSize: 4", "FileSize: 0"))
    assert holds(cache, PATH)
    (folder / "nar/abc.nar.xz").write_bytes(b"")
    assert not holds(cache, PATH)
    (folder / narinfo.name_of(PATH)).write_text("garbage")
    assert entry(cache, PATH) is None
    other = ENTRY.replace("hello", "bye")
    (folder / narinfo.name_of(PATH)).write_text(other)
    assert entry(cache, PATH) is None
    cache.close()


def test_a_server_that_is_gone_or_broken_is_told_from_a_missing_path(tmp_path):
    with WebCache(tmp_path / "cache") as web:
        cache = open_cache(web.url)
        assert entry(cache, PATH) is None
        (tmp_path / "cache" / narinfo.name_of(PATH)).mkdir()
    with pytest.raises(CacheFailed, match=web.url):
        entry(cache, PATH)
    with pytest.raises(CacheFailed, match="directory"):
        entry(open_cache(f"file://{tmp_path}/cache"), PATH)


@pytest.mark.parametrize("uri", [None, "ssh-ng://builder", "daemon", "http:///nothing"])
def test_other_stores_are_not_looked_into(uri):
    assert open_cache(uri) is None


def test_sizes_are_asked_for_once_and_only_while_there_is_time(place):
    folder, uri = place
    now = 0.0
    sizes = CacheSizes(uri, lambda: now)
    (folder / narinfo.name_of(PATH)).write_text(ENTRY)
    assert sizes.of(PATH) is None  # no page has begun
    sizes.begin_page()
    now = 1.0
    assert sizes.of(PATH) is None  # its time is over
    sizes.begin_page()
    assert sizes.of(PATH) == 196040
    (folder / narinfo.name_of(PATH)).unlink()
    now = 2.0
    assert sizes.of(PATH) == 196040
    sizes.close()


def test_a_cache_that_fails_is_left_alone_for_a_while(tmp_path):
    now = 0.0
    with WebCache(tmp_path) as web:
        sizes = CacheSizes(web.url, lambda: now)
    sizes.begin_page()
    assert sizes.of(PATH) is None
    (tmp_path / narinfo.name_of(PATH)).write_text(ENTRY)
    again = CacheSizes(f"file://{tmp_path}", lambda: now)
    again.begin_page()
    assert again.of(PATH) == 196040
    now = 30.0
    sizes.begin_page()
    assert sizes.of("/nix/store/other") is None


@needs_nix
def test_entries_of_nix_are_read(chroot, place):
    _, uri = place
    store = chroot("w1")
    expression = (
        f"let a = {build('a', 'echo > $out')}; in {build('b', 'echo $a > $out', 'inherit a;')}"
    )
    out = store.run("nix-store", "--realise", store.instantiate(expression)).stdout.split()[-1]
    store.run("nix", "copy", "--to", uri, out)
    cache = open_cache(uri)
    found = entry(cache, out)
    assert found.nar_size == int(store.run("nix-store", "-q", "--size", out).stdout)
    assert found.nar_hash == store.run("nix-store", "-q", "--hash", out).stdout.strip()
    references = store.run("nix-store", "-q", "--references", out).stdout.split()
    assert [f"/nix/store/{name}" for name in found.references] == references
    assert holds(cache, out)
    cache.close()
