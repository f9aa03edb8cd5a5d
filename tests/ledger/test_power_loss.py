"""I9: what the ledger was told to make durable survives kill -9 and power loss, whole."""

from __future__ import annotations

from random import Random

import pytest

from actors.ledger.records import Admission, ClaimRecord, CloseClaim, OpenClaim, SetJob
from actors.ledger.sqlite import SqliteLedger
from tests.ledger.ledgers import admit, record
from tests.sim.disk import Disk, Inode


@pytest.fixture
def disk():
    disk = Disk()
    yield disk
    disk.close()


def open_on(disk: Disk, folder, life: int) -> SqliteLedger:
    ledger = SqliteLedger.open(
        folder / "ledger.sqlite3", f"server-{life}", wall=lambda: 100.0, files=disk
    )
    ledger.recover([f"server-{n}" for n in range(life)])
    return ledger


def states(ledger: SqliteLedger) -> dict[str, str]:
    jobs = ledger.jobs_page(None, None, 100_000)
    return {job.job_id: job.status for job in jobs}


class Past:
    """The states that a ledger was in, and from which of them on it may be found again."""

    def __init__(self) -> None:
        self.states: list[dict[str, str]] = [{}]
        self.durable = 0

    def changed(self, ledger: SqliteLedger) -> None:
        self.states.append(states(ledger))

    def synced(self) -> None:
        self.durable = len(self.states) - 1

    def found(self, ledger: SqliteLedger) -> None:
        now = states(ledger)
        assert now in self.states[self.durable :]
        del self.states[self.states.index(now) + 1 :]

    def on_disk(self) -> None:
        """What is found next is all that the disk has: it stays."""
        self.states, self.durable = self.states[-1:], 0


def work(ledger: SqliteLedger, random: Random, past: Past) -> None:
    """Writes of all kinds, made durable now and then."""
    for n in range(random.randint(1, 25)):
        name = f"{ledger.server}-{n}"
        if random.random() < 0.5:
            jobs = tuple(record(f"{name}-{i}") for i in range(random.randint(1, 40)))
            ledger.admit(Admission(name, jobs), 0.0, chunk_rows=random.choice((30, 2_000)))
        else:
            admit(ledger, record(name), requester=name)
            past.changed(ledger)
            own = ClaimRecord(f"a{name}", name, "w", "session", ledger.server, 5.0)
            rows = [SetJob(name, "Queued", 1.0, 0, 0, ready_at=1.0), OpenClaim(own)]
            assert ledger.apply(rows, 0.0, 1.0) == [True, True]
            past.changed(ledger)
            ends = [
                CloseClaim(name, f"a{name}", 2.0, "Completed"),
                SetJob(name, "Completed", 2.0, 1, 0),
            ]
            assert ledger.apply(ends, 0.0, 1.0) == [True, True]
        past.changed(ledger)
        if random.random() < 0.3:
            ledger.sync()
            past.synced()
        if random.random() < 0.2:
            ledger.checkpoint()
        if random.random() < 0.1:
            ledger.relieve()


@pytest.mark.parametrize("seed", range(15))
def test_what_was_synced_survives_and_what_survives_is_a_state_that_was(disk, tmp_path, seed):
    random = Random(seed)
    past, end = Past(), 0.0
    for life in range(1, 7):
        ledger = open_on(disk, tmp_path, life)
        if life > 1:
            past.found(ledger)
            if end >= 0.4:
                past.on_disk()
            db = ledger._writer.db
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        work(ledger, random, past)
        end = random.random()
        if end < 0.2:
            ledger.close()
            past.synced()
        elif end < 0.4:
            before = past.states[-1]
            disk.end_process(ledger.close)
            heir = open_on(disk, tmp_path, 100 + life)
            assert states(heir) == before
            disk.end_process(heir.close)
        else:
            disk.lose_power(ledger.close, random)


@pytest.mark.parametrize("operations", range(0, 40, 3))
def test_a_ledger_that_was_just_being_made_is_made_again(tmp_path, operations):
    for seed in range(8):
        folder = tmp_path / str(seed)
        folder.mkdir()
        disk = Disk()
        disk.stop_after(operations)
        ledger = open_on(disk, folder, 1)
        disk.lose_power(ledger.close, Random(seed))
        again = open_on(disk, folder, 2)
        assert states(again) == {}
        admit(again, record("a"))
        again.close()
        disk.close()


def test_without_the_sync_of_the_log_the_last_writes_are_lost(disk, tmp_path):
    """Else the test above would prove nothing."""
    lost = 0
    for seed in range(20):
        ledger = open_on(disk, tmp_path, 2 * seed + 1)
        admit(ledger, record(f"kept-{seed}"), requester=f"k{seed}")
        ledger.sync()
        admit(ledger, record(f"risked-{seed}"), requester=f"r{seed}")
        disk.lose_power(ledger.close, Random(seed))
        ledger = open_on(disk, tmp_path, 2 * seed + 2)
        names = states(ledger)
        assert f"kept-{seed}" in names
        lost += f"risked-{seed}" not in names
        ledger.close()
    assert 0 < lost < 20


def test_a_sector_is_one_of_the_versions_that_it_had():
    inode = Inode()
    inode.since = [(0, b"a" * 1536)]
    inode.sync()
    inode.since = [(0, b"b" * 1024), (512, b"c" * 1536)]
    seen = {inode.after_power_loss(Random(seed)) for seed in range(300)}
    assert {b"a" * 1536, b"b" * 512 + b"c" * 1536} < seen
    assert {len(image) for image in seen} == {1536, 2048}
    for image in seen:
        parts = [image[at : at + 512] for at in range(0, len(image), 512)]
        assert all(len(set(part)) == 1 for part in parts)
        assert parts[0][0] in b"ab"
        assert parts[1][0] in b"abc"
        assert parts[2][0] in b"ac"


def test_a_truncation_happens_whole_or_not_at_all():
    inode = Inode()
    inode.since = [(0, b"a" * 1024)]
    inode.sync()
    inode.since = [(0, None), (0, b"b" * 512)]
    seen = {inode.after_power_loss(Random(seed)) for seed in range(100)}
    assert seen == {b"a" * 1024, b"", b"b" * 512, bytes(512)}
