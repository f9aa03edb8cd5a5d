"""Build logs: appended in order, read in parts, and never a reason for the server to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from actors.server import logbook as module
from actors.server.effects import DropLogs, Log, ReadLog
from actors.server.logbook import MAX_QUEUED_BYTES, Logbook
from transport import messages as m


class Desk:
    """A logbook at work, with the answers that it gave."""

    def __init__(self, folder: Path) -> None:
        self.answers: list[tuple[bytes, m.CmdLogsReply]] = []
        self.book = Logbook(folder, lambda peer, reply: self.answers.append((peer, reply)))

    def write(self, job: str, data: bytes, assignment: str = "a1") -> None:
        self.book.put(Log(job, assignment, data))

    async def read(self, job: str, offset: int = 0, *, has_ended: bool = True) -> m.CmdLogsReply:
        self.book.put(ReadLog(b"p", 1, job, offset, has_ended))
        await self.finish()
        return self.answers[-1][1]

    async def finish(self) -> None:
        """Lets the logbook work until nothing waits."""

        async def here(function, *arguments):
            await trio.lowlevel.checkpoint()
            return function(*arguments)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.book.run, here)
            with trio.fail_after(10):
                while self.book.queue:
                    await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "logs")


async def test_a_read_sees_what_was_written_before_it_and_not_after(desk):
    desk.write("j", b"one ")
    desk.write("j", b"two")
    desk.write("other", b"no")
    desk.book.put(ReadLog(b"p", 7, "j", 0, False))
    desk.write("j", b" three")
    await desk.finish()
    [(peer, reply)] = desk.answers
    assert (peer, reply.request, reply.data, reply.offset) == (b"p", 7, b"one two", 7)
    assert not reply.is_end
    again = await desk.read("j", 4)
    assert (again.data, again.offset, again.is_end) == (b"two three", 13, True)


async def test_a_long_log_comes_in_parts(desk, monkeypatch):
    monkeypatch.setattr(module, "READ_BYTES", 4)
    desk.write("j", b"0123456789")
    offset, parts = 0, []
    while not (reply := await desk.read("j", offset)).is_end:
        parts.append(reply.data)
        offset = reply.offset
    assert [*parts, reply.data] == [b"0123", b"4567", b"89"]


async def test_logs_of_forgotten_jobs_are_removed_behind_what_is_still_written(desk, tmp_path):
    desk.write("old", b"1")
    desk.write("new", b"2")
    desk.book.put(DropLogs(("old", "never there")))
    await desk.finish()
    assert [entry.name for entry in (tmp_path / "logs").iterdir()] == ["new"]
    assert (await desk.read("old")).data == b""


async def test_only_the_newest_run_is_shown(desk):
    desk.write("j", b"first try", "a1")
    await desk.finish()
    desk.write("j", b"second", "a2")
    assert (await desk.read("j")).data == b"second"


async def test_a_job_without_a_log_has_an_empty_one(desk):
    reply = await desk.read("nothing", has_ended=False)
    assert (reply.data, reply.offset, reply.is_end) == (b"", 0, False)


@pytest.mark.parametrize("offset", [10**6, 2**62, 2**63 - 1])
async def test_an_offset_beyond_the_end_is_no_failure(desk, offset):
    desk.write("j", b"short")
    reply = await desk.read("j", offset)
    assert (reply.data, reply.offset) == (b"", offset)


async def test_a_log_ends_at_its_limit(desk, monkeypatch):
    monkeypatch.setattr(module, "MAX_LOG_BYTES", 8)
    for _ in range(3):
        desk.write("j", b"12345")
        await desk.finish()
    assert (await desk.read("j")).data == b"12345123"


@pytest.mark.parametrize("job", ["../../escape", "a/b", ".", "", "x" * 200, "ü"])
async def test_ids_never_lead_out_of_the_folder(desk, job, tmp_path):
    desk.write(job, b"text", job)
    assert (await desk.read(job)).data == b"text"
    [file] = (p for p in tmp_path.rglob("*") if p.is_file())
    assert file.parent.parent == tmp_path / "logs"


async def test_beyond_its_bound_chunks_are_dropped_and_counted(desk):
    chunk = bytes(MAX_QUEUED_BYTES // 4)
    for n in range(6):
        desk.write(f"j{n}", chunk)
    assert (desk.book.queue, desk.book.dropped) == (4, 2)
    await desk.finish()
    desk.write("j", b"room again")
    assert desk.book.dropped == 2


async def test_a_disk_that_takes_nothing_costs_log_and_nothing_else(desk, tmp_path):
    (tmp_path / "logs").write_text("a file where the folder should be")
    desk.write("j", b"lost")
    desk.write("k", b"lost too")
    reply = await desk.read("j")
    assert (reply.data, desk.book.dropped) == (b"", 2)
    (tmp_path / "logs").unlink()
    desk.write("j", b"kept")
    assert (await desk.read("j")).data == b"kept"


async def test_a_full_disk_is_said_once_and_so_is_its_end(desk, tmp_path, caplog):  # chaos
    caplog.set_level("INFO")
    (tmp_path / "logs").write_text("a file where the folder should be")
    for _ in range(3):
        desk.write("j", b"lost")
        await desk.finish()
    (tmp_path / "logs").unlink()
    for _ in range(3):
        desk.write("j", b"kept")
        await desk.finish()
    [begun, over] = caplog.messages
    assert begun.startswith("build logs are not written: ")
    assert over == "build logs are written again; 3 pieces were dropped"


async def test_what_waits_survives_the_end_of_an_incarnation(desk):
    stuck = trio.Event()

    async def never(function, *arguments):
        stuck.set()
        await trio.sleep_forever()

    desk.write("j", b"text")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.book.run, never)
        await stuck.wait()
        nursery.cancel_scope.cancel()
    assert (await desk.read("j")).data == b"text"
