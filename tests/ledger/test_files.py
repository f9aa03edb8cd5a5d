"""Files that a server finds at its start: older, newer, damaged, unreadable, or no room for one."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from actors.ledger import schema
from actors.ledger.connection import Files
from actors.ledger.errors import LedgerCorrupt, LedgerFailed, LedgerTooNew
from actors.ledger.records import OpenClaim, SetJob
from actors.ledger.sqlite import SqliteLedger
from tests.ledger.ledgers import admit, claim, open_ledger, record

ROOT = Path(__file__).parents[2]
NEWEST = len(schema.MIGRATIONS)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A ledger with a running job, closed in order."""
    ledger = open_ledger(tmp_path)
    admit(ledger, *(record(f"job-{n}") for n in range(300)), record("last", "job-0"))
    ledger.apply([SetJob("job-0", "Queued", 1.0, 0, 0, ready_at=1.0)], 0.0, 1.0)
    ledger.apply([OpenClaim(claim(1, "job-0"))], 0.0, 1.0)
    ledger.close()
    return tmp_path / "ledger.sqlite3"


def everything(folder: Path) -> dict[str, bytes]:
    """The files of a directory that hold something, but for SQLite's index of the log, which is
    rebuilt anyway."""
    kept = [path for path in folder.iterdir() if not path.name.endswith("-shm")]
    return {path.name: data for path in kept if (data := path.read_bytes())}


def refused(folder: Path, error: type[Exception]) -> str:
    """Opening fails with one line that names the file, and changes nothing; returns the line."""
    before = everything(folder)
    with pytest.raises(error) as caught:
        open_ledger(folder, "server-2")
    text = str(caught.value)
    assert "\n" not in text
    assert "ledger.sqlite3" in text
    assert everything(folder) == before
    return text


# -- versions --------------------------------------------------------------------------------------


def in_version(path: Path, version: int) -> None:
    """Writes a ledger as the program of that version did, with one job that runs."""
    db = sqlite3.connect(path)
    for statements in schema.MIGRATIONS[:version]:
        for statement in statements:
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {version}")
    db.execute("INSERT INTO server VALUES (1, 'old', 10.0, 10.0)")
    db.execute("INSERT INTO project VALUES ('default', 10.0)")
    db.execute("INSERT INTO submission VALUES (1, 's1', 1, 'accepted', 10.0, 10.0)")
    db.execute("INSERT INTO drv VALUES (1, '/nix/store/a.drv')")
    db.execute(
        "INSERT INTO job (seq, id, kind, project, name, status, drv_path, submission, prioritized,"
        " interactive, attempts, losses, created_at, ready_at, changed_at, changed_by)"
        " VALUES (1, 'a', 'build', 'default', 'a', 'Building', '/nix/store/a.drv', 1, 0, 0, 1, 0,"
        " 10.0, 11.0, 12.0, 1)"
    )
    db.execute("INSERT INTO job_body VALUES (1, '[\"/nix/store/a\"]', x'a0')")
    db.execute("INSERT INTO requester VALUES (1, 1)")
    db.execute(
        "INSERT INTO dispatched_job (id, job, worker, session, server, claimed_at)"
        " VALUES ('a1', 'a', 'w', 'c', 'old', 12.0)"
    )
    db.commit()
    db.close()


@pytest.mark.parametrize("version", range(1, NEWEST))
def test_a_ledger_of_every_earlier_version_opens_with_all_that_it_holds(tmp_path, version):
    in_version(tmp_path / "ledger.sqlite3", version)
    ledger = open_ledger(tmp_path)
    snapshot = ledger.load(0.0)
    [job] = snapshot.jobs
    assert (job.job_id, job.status, job.ready_at, job.attempts) == ("a", "Building", 11.0, 1)
    assert [(c.assignment_id, c.worker) for c in snapshot.claims] == [("a1", "w")]
    assert snapshot.requesters == {"a": ("s1",)}
    assert ledger._writer.db.execute("PRAGMA user_version").fetchone() == (NEWEST,)
    ledger.close()


def test_every_migration_ends_in_the_same_tables_as_a_new_ledger(tmp_path):
    def tables(path: Path) -> set[tuple[str, ...]]:
        with sqlite3.connect(path) as db:
            return set(db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))

    new = tmp_path / "new"
    new.mkdir()
    open_ledger(new).close()
    for version in range(1, NEWEST):
        old = tmp_path / f"v{version}"
        old.mkdir()
        in_version(old / "ledger.sqlite3", version)
        open_ledger(old).close()
        assert tables(old / "ledger.sqlite3") == tables(new / "ledger.sqlite3")


def test_a_migration_that_fails_leaves_the_old_version_whole(tmp_path, monkeypatch):
    path = tmp_path / "ledger.sqlite3"
    in_version(path, NEWEST)
    broken = (*schema.MIGRATIONS, ("CREATE TABLE fine (x)", "CREATE TABLE job (x)"))
    monkeypatch.setattr(schema, "MIGRATIONS", broken)
    with pytest.raises(LedgerFailed, match="already exists"):
        open_ledger(tmp_path)
    monkeypatch.undo()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (NEWEST,)
        assert db.execute("SELECT 1 FROM sqlite_master WHERE name = 'fine'").fetchall() == []
    db.close()
    open_ledger(tmp_path).close()


def test_a_newer_ledger_is_refused_with_what_to_do(filled):
    with sqlite3.connect(filled) as db:
        db.execute(f"PRAGMA user_version = {NEWEST + 1}")
    db.close()
    text = refused(filled.parent, LedgerTooNew)
    assert f"schema version {NEWEST + 1}" in text
    assert "upgrade headrace" in text


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1, 99, 100, 4096, 4097, 0.5, 0.99])
def test_a_truncated_file_is_refused_and_left_alone(filled, kept):
    size = filled.stat().st_size
    os.truncate(filled, int(kept * size) if isinstance(kept, float) else kept)
    refused(filled.parent, LedgerCorrupt)


@pytest.mark.parametrize("what", ["all", "magic", "page size", "half"])
def test_a_garbage_header_is_refused_and_left_alone(filled, what):
    data = bytearray(filled.read_bytes())
    if what == "all":
        data[:100] = b"\xa5" * 100
    elif what == "magic":
        data[:16] = b"SQLite format 9\0"
    elif what == "page size":
        data[16:18] = b"\x00\x03"
    else:
        data[20:60] = bytes(40)
    filled.write_bytes(data)
    refused(filled.parent, LedgerCorrupt)


def test_a_damaged_page_in_the_middle_is_found_at_the_start(filled):
    data = bytearray(filled.read_bytes())
    for page in range(5, len(data) // 4096, 3):
        data[page * 4096 : page * 4096 + 200] = b"\x5a" * 200
    filled.write_bytes(data)
    refused(filled.parent, LedgerCorrupt)


def crashed(folder: Path) -> None:
    """A ledger whose log was never written back: what kill -9 leaves."""
    running = folder / "running"
    running.mkdir()
    ledger = open_ledger(running)
    admit(ledger, *(record(f"job-{n}") for n in range(50)))
    for suffix in ("", "-wal"):
        shutil.copy(running / f"ledger.sqlite3{suffix}", folder)
    ledger.close()
    shutil.rmtree(running)


def test_an_empty_file_beside_a_log_is_refused_and_the_log_kept(tmp_path):
    """SQLite takes an empty file for a new database, and deletes the log that belonged to it."""
    crashed(tmp_path)
    (tmp_path / "ledger.sqlite3").write_bytes(b"")
    text = refused(tmp_path, LedgerCorrupt)
    assert "ledger.sqlite3-wal" in text


def test_a_missing_file_beside_a_log_is_refused_and_the_log_kept(tmp_path):
    crashed(tmp_path)
    (tmp_path / "ledger.sqlite3").unlink()
    refused(tmp_path, LedgerCorrupt)


def test_a_torn_log_is_read_up_to_where_it_is_whole(tmp_path):
    crashed(tmp_path)
    log = tmp_path / "ledger.sqlite3-wal"
    os.truncate(log, log.stat().st_size - 100)
    ledger = open_ledger(tmp_path, "server-2")
    assert ledger.counts() in ({}, {"Created": 50})
    ledger.close()


def test_an_empty_file_alone_becomes_a_ledger(tmp_path):
    (tmp_path / "ledger.sqlite3").write_bytes(b"")
    ledger = open_ledger(tmp_path)
    assert ledger.counts() == {}
    ledger.close()


# -- no access, no room ----------------------------------------------------------------------------

OPEN = """
import os, sys
from pathlib import Path
from actors.ledger.errors import LedgerError
from actors.ledger.sqlite import SqliteLedger
os.setuid(65534)
try:
    SqliteLedger.open(Path(sys.argv[1]), "server-2")
except LedgerError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="takes the rights of a user who has none")
@pytest.mark.parametrize("is_there", [True, False])
def test_a_directory_that_cannot_be_written_is_named(filled, is_there, tmp_path_factory):
    folder = filled.parent
    for parent in (folder, *folder.parents):
        if parent.owner() == "root" and parent != Path("/") and "pytest" in str(parent):
            parent.chmod(0o755)
    if not is_there:
        filled.unlink()
    before = everything(folder)
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(filled)], cwd=ROOT, text=True, capture_output=True,
        check=True, timeout=60,
    )  # fmt: skip
    [line] = done.stdout.splitlines()
    assert line.startswith("LedgerFailed ")
    assert str(filled) in line
    assert everything(folder) == before


class FullDisk(Files):
    """Every database may grow by this many pages and no more."""

    def __init__(self, pages: int) -> None:
        self.pages = pages

    def connect(self, uri: str) -> sqlite3.Connection:
        db = super().connect(uri)
        have = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {have + self.pages}")
        return db


@pytest.mark.parametrize("pages", range(1, 40, 3))
def test_a_disk_that_is_full_at_the_start_is_named_and_nothing_half_made(tmp_path, pages):
    path = tmp_path / "ledger.sqlite3"
    with pytest.raises(LedgerFailed, match=r"ledger\.sqlite3: .*full.*\Z"):
        SqliteLedger.open(path, "s", files=FullDisk(pages))
    ledger = open_ledger(tmp_path)  # once there is room
    assert ledger.counts() == {}
    ledger.close()
