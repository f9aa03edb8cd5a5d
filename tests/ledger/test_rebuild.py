"""What made lost paths is queued again, for one job's sake."""

from __future__ import annotations

from actors.ledger.records import Rebuild, SetJob
from tests.ledger.ledgers import admit, drv, record


def become(ledger, status: str, *names: str) -> None:
    writes = [SetJob(n, status, at=1.0, attempts=1, losses=1, ready_at=1.0) for n in names]
    ledger.apply(writes, 0.0, 1.0)


def test_only_what_made_a_missing_path_is_queued_again(ledger):
    admit(ledger, record("base"), record("lib", "base"), record("other"),
          record("main", "lib", "other"))  # fmt: skip
    become(ledger, "Completed", "base", "lib", "other")
    become(ledger, "Queued", "main")
    found = ledger.rebuild("main", ["/nix/store/lib", "/nix/store/source"])
    assert found.job_id == "main"
    assert [(r.job_id, r.status, r.attempts, r.losses) for r in found.requeued] == [
        ("lib", "Created", 0, 0)
    ]
    assert found.known.keys() == {drv("base")}
    assert found.known[drv("base")].status == "Completed"
    assert found.requesters == ("s1",)
    assert ledger.counts() == {"Completed": 2, "Created": 2}
    assert ledger.job("main", 0.0).status == "Created"


def test_nothing_changes_unless_the_job_waits_and_something_made_the_path(ledger):
    admit(ledger, record("lib"), record("main", "lib"))
    become(ledger, "Completed", "lib")
    for status, missing in (("Building", "lib"), ("Failed", "lib"), ("Queued", "source")):
        become(ledger, status, "main")
        assert ledger.rebuild("main", [f"/nix/store/{missing}"]) == Rebuild("main")
        assert ledger.job("main", 0.0).status == status
        assert ledger.job("lib", 0.0).status == "Completed"
    assert ledger.rebuild("nobody", ["/nix/store/lib"]) == Rebuild("nobody")


def test_who_wants_the_job_wants_what_is_built_again(ledger):
    admit(ledger, record("lib"), requester="first")
    become(ledger, "Completed", "lib")
    admit(ledger, record("main", "lib"), requester="second")
    become(ledger, "Queued", "main")
    assert ledger.rebuild("main", ["/nix/store/lib"]).requesters == ("second",)
    assert ledger.jobs_of("second") == ["lib", "main"]
    assert ledger.jobs_of("first") == ["lib"]


def test_a_server_that_starts_then_finds_them_waiting(ledger):
    admit(ledger, record("lib"), record("main", "lib"))
    become(ledger, "Completed", "lib")
    become(ledger, "Queued", "main")
    ledger.rebuild("main", ["/nix/store/lib"])
    snapshot = ledger.load(0.0)
    assert {job.job_id: job.status for job in snapshot.jobs} == {
        "lib": "Created",
        "main": "Created",
    }
    assert ledger._writer.db.execute("PRAGMA foreign_key_check").fetchall() == []
