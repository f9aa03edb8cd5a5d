"""Inputs that are gone: what made them is built again, and the job that needs them waits for it."""

from __future__ import annotations

from msgspec.structs import replace

from actors.ledger.port import Answer
from actors.ledger.records import ForeignChanges, Known, Rebuild
from actors.server.feeder import REBUILD, Feeder
from actors.server.jobs import build_record
from tests.server.farm_harness import Harness, job
from transport import messages as m


def lack(farm: Harness, given: m.AssignJob, *names: str, peer: str = "w") -> None:
    """The worker can get what these jobs made nowhere."""
    farm.send(
        peer,
        m.JobFailed(
            job_id=given.job_id, assignment_id=given.assignment_id, kind="InputsUnavailable",
            error="not to be had", missing_paths=[f"/nix/store/{name}" for name in names],
        ),
    )  # fmt: skip


def run(farm: Harness, name: str, peer: str = "w") -> None:
    given = farm.request(peer)
    assert given.job_id == farm.ids[name]
    farm.complete(peer, given)


def statuses(farm: Harness) -> dict[str, str]:
    return {name: farm.status(name) for name in farm.ids}


def test_what_made_a_lost_path_is_built_again_and_then_the_job(farm):
    farm.submit(job("lib"), job("other"), job("main", "lib", "other"))
    farm.worker("w")
    for name in ("lib", "other"):
        run(farm, name)
    lack(farm, farm.request("w"), "lib")
    assert statuses(farm) == {"lib": "Queued", "other": "Completed", "main": "Created"}
    counts = farm.farm.feeder.counts
    assert {s: n for s, n in counts.items() if n} == {"Queued": 1, "Completed": 1, "Created": 1}
    run(farm, "lib")
    given = farm.request("w")  # at once: no backoff
    assert given.job_id == farm.ids["main"]
    assert sorted(r.path for r in given.job.required_paths) == [
        "/nix/store/lib", "/nix/store/other",
    ]  # fmt: skip
    farm.complete("w", given)
    assert set(statuses(farm).values()) == {"Completed"}
    assert farm.outcomes("lib") == ["Completed", "Completed"]
    assert farm.outcomes("main") == ["InputsUnavailable", "Completed"]


def test_a_path_that_is_lost_again_and_again_fails_the_job_in_the_end(farm):
    farm.submit(job("lib"), job("main", "lib"), job("top", "main"))
    farm.worker("w")
    for _ in range(3):
        run(farm, "lib")
        lack(farm, farm.request("w"), "lib")
    assert statuses(farm) == {"lib": "Completed", "main": "Failed", "top": "DependencyFailed"}
    assert farm.request("w") is None
    assert farm.outcomes("lib") == ["Completed"] * 3


def test_inputs_are_built_again_three_times_at_most(make_farm):
    farm = make_farm(max_attempts=10)
    farm.submit(job("lib"), job("main", "lib"))
    farm.worker("w")
    for _ in range(4):
        run(farm, "lib")
        lack(farm, farm.request("w"), "lib")
    assert statuses(farm) == {"lib": "Completed", "main": "Failed"}
    assert farm.request("w") is None
    assert farm.outcomes("lib") == ["Completed"] * 4
    assert farm.outcomes("main") == ["InputsUnavailable"] * 4


def test_what_nobody_makes_is_waited_for_as_ever(make_farm):
    farm = make_farm(retry_backoff=10.0)
    farm.submit(job("lib"), job("main", "lib", input_srcs=["/nix/store/source"]))
    farm.worker("w")
    run(farm, "lib")
    lack(farm, farm.request("w"), "source")
    assert statuses(farm) == {"lib": "Completed", "main": "Queued"}
    assert farm.request("w") is None
    farm.wait(11)
    assert farm.request("w").job_id == farm.ids["main"]


def test_two_jobs_wait_for_one_rebuild(farm):
    farm.submit(job("lib"), job("a", "lib"), job("b", "lib"))
    farm.worker("w", slots=2)
    run(farm, "lib")
    first, second = farm.request("w"), farm.request("w")
    lack(farm, first, "lib")
    lack(farm, second, "lib")
    assert statuses(farm) == {"lib": "Queued", "a": "Created", "b": "Created"}
    run(farm, "lib")
    run(farm, "a")
    run(farm, "b")
    assert farm.outcomes("lib") == ["Completed", "Completed"]


def test_a_rebuild_may_need_another_one_first(farm):
    farm.submit(job("base"), job("lib", "base"), job("main", "lib"))
    farm.worker("w")
    run(farm, "base")
    run(farm, "lib")
    lack(farm, farm.request("w"), "lib")
    lack(farm, farm.request("w"), "base")
    assert statuses(farm) == {"base": "Queued", "lib": "Created", "main": "Created"}
    for name in ("base", "lib", "main"):
        run(farm, name)
    assert set(statuses(farm).values()) == {"Completed"}


def test_a_rebuild_that_fails_takes_along_what_waits_for_it(farm):
    farm.submit(job("lib"), job("main", "lib"))
    farm.worker("w")
    run(farm, "lib")
    lack(farm, farm.request("w"), "lib")
    farm.fail("w", farm.request("w"), "Permanent")
    assert statuses(farm) == {"lib": "Failed", "main": "DependencyFailed"}


def test_a_rebuild_survives_a_restart_of_the_server(farm):
    farm.submit(job("lib"), job("main", "lib"))
    farm.worker("w")
    run(farm, "lib")
    lack(farm, farm.request("w"), "lib")
    farm.restart()
    farm.worker("w")
    run(farm, "lib")
    run(farm, "main")
    assert set(statuses(farm).values()) == {"Completed"}


def test_what_is_cancelled_takes_its_rebuild_along(farm):
    submission = farm.submit(job("lib"), job("main", "lib")).submission
    farm.worker("w")
    run(farm, "lib")
    lack(farm, farm.request("w"), "lib")
    farm.send("client", m.CmdCancel(request=2, targets=[submission]))
    assert statuses(farm) == {"lib": "Aborted", "main": "Aborted"}


def test_a_ledger_that_cannot_answer_leaves_the_job_to_its_backoff(make_farm):
    farm = make_farm(retry_backoff=10.0)
    farm.submit(job("lib"), job("main", "lib"))
    farm.worker("w")
    run(farm, "lib")
    farm.ledger.rebuild = lambda job_id, missing: None
    lack(farm, farm.request("w"), "lib")
    assert statuses(farm) == {"lib": "Completed", "main": "Queued"}
    farm.wait(11)
    assert farm.request("w").job_id == farm.ids["main"]


def test_an_answer_for_a_job_that_has_moved_on_changes_nothing(farm):
    farm.submit(job("lib"), job("main", "lib"))
    farm.worker("w")
    run(farm, "lib")
    given = farm.request("w")
    job_id = farm.ids["main"]
    assert farm.ledger.rebuild(job_id, ["/nix/store/lib"]) == Rebuild(job_id)  # it runs
    farm.take(Answer(f"{REBUILD}{job_id}", Rebuild(job_id)))
    farm.take(Answer(f"{REBUILD}nobody", None, "the disk is full"))
    farm.complete("w", given)
    assert set(statuses(farm).values()) == {"Completed"}


def test_another_server_follows_a_job_that_waits_again():
    lib, main = (
        build_record(job(name, *needs), f"j-{name}", interactive=False)
        for name, needs in (("lib", ()), ("main", ("lib",)))
    )
    feeder = Feeder()
    queued = {"status": "Queued", "ready_at": 1.0}
    feeder.foreign(ForeignChanges((replace(lib, status="Completed"),), {}), (), 1.0)
    known = {lib.drv_path: Known(lib.job_id, "Completed", lib.outputs)}
    feeder.foreign(ForeignChanges((replace(main, **queued),), known), (), 1.0)
    assert feeder.nodes["j-main"].status == "Queued"
    feeder.foreign(ForeignChanges((replace(lib, **queued), main), {}), (), 2.0)
    feeder.check()
    assert feeder.nodes["j-main"].waits_for == 1
    feeder.foreign(
        ForeignChanges((replace(lib, status="Completed"), replace(main, **queued)), known), (), 3.0
    )
    feeder.check()
    assert feeder.nodes["j-main"].status == "Queued"
