"""Tables of the ledger and how an older file becomes a current one.

Rules of the file:

- `MIGRATIONS[n]` takes a file from version n to n + 1. What was released is never edited; a
  change is one more entry.
- Times are wall-clock unix seconds. Truth values are 0 and 1.
- Portable to PostgreSQL but for the storage clauses (`WITHOUT ROWID`, integer keys).
- Every index is paid for by a claim or an admission; each says what reads it.

Foreign keys are declared and not enforced: one write path fills the tables, enforcing them
would cost two look-ups for each of a million edges. The tests run `PRAGMA foreign_key_check`.

What is staged: a large admission is written in many transactions under a `submission` row in
state 'staging'. A job is visible once the submission that brought it is no longer staging; a
requester is counted while its submission is 'accepted'. One small update of `submission.state`
therefore shows, or drops, all at once.
"""

from __future__ import annotations

import sqlite3

from .errors import LedgerTooNew

APPLICATION_ID = 0x48445243  # "HDRC", kept in the file's header

_V1 = (
    # changed_by of a job and the owner of what is staged.
    """CREATE TABLE server (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        started_at REAL NOT NULL,
        logged_at REAL NOT NULL
    )""",
    """CREATE TABLE project (
        id TEXT PRIMARY KEY NOT NULL,
        created_at REAL NOT NULL
    )""",
    """CREATE TABLE submission (
        seq INTEGER PRIMARY KEY,
        requester TEXT NOT NULL,
        server INTEGER NOT NULL REFERENCES server (seq),
        state TEXT NOT NULL CHECK (state IN ('staging', 'accepted', 'dropped')),
        created_at REAL NOT NULL,
        accepted_at REAL
    )""",
    "CREATE INDEX submission_requester ON submission (requester, state)",
    # Read by everything that must not show what is staged: nearly always empty.
    "CREATE INDEX submission_staging ON submission (seq) WHERE state = 'staging'",
    # Read by the other servers at their tick.
    "CREATE INDEX submission_accepted ON submission (server, accepted_at)",
    # A number for each derivation that a job builds or waits for, so that an edge is a pair of
    # integers. It is the key of the derivation's job; an evaluation takes one without a path.
    """CREATE TABLE drv (
        seq INTEGER PRIMARY KEY,
        path TEXT UNIQUE
    )""",
    """CREATE TABLE job (
        seq INTEGER PRIMARY KEY REFERENCES drv (seq),
        id TEXT NOT NULL UNIQUE,
        kind TEXT NOT NULL CHECK (kind IN ('eval', 'build')),
        project TEXT NOT NULL REFERENCES project (id),
        name TEXT NOT NULL,
        status TEXT NOT NULL,
        drv_path TEXT,
        submission INTEGER NOT NULL REFERENCES submission (seq),
        prioritized INTEGER NOT NULL,
        interactive INTEGER NOT NULL,
        attempts INTEGER NOT NULL,
        losses INTEGER NOT NULL,
        created_at REAL NOT NULL,
        ready_at REAL,
        retry_at REAL,
        ended_at REAL,
        error TEXT,
        changed_at REAL NOT NULL,
        changed_by INTEGER NOT NULL REFERENCES server (seq)
    )""",
    # A starting server reads what has not ended, `headrace jobs` a page of one status.
    "CREATE INDEX job_status ON job (status, id)",
    # Read by the other servers at their tick.
    "CREATE INDEX job_changed ON job (changed_by, changed_at)",
    "CREATE INDEX job_name ON job (name)",
    # Apart from `job`, whose rows are rewritten with every change of status.
    """CREATE TABLE job_body (
        job INTEGER PRIMARY KEY REFERENCES job (seq),
        outputs TEXT NOT NULL,
        payload BLOB NOT NULL
    )""",
    """CREATE TABLE dependency (
        job INTEGER NOT NULL REFERENCES job (seq),
        needs INTEGER NOT NULL REFERENCES drv (seq),
        PRIMARY KEY (job, needs)
    ) WITHOUT ROWID""",
    # The same edges by what is needed. A table and not an index, because a large admission
    # fills it in key order after the rest: an index would be written all over in each of the
    # admission's transactions, a hundred times its size in all.
    """CREATE TABLE dependent (
        needs INTEGER NOT NULL REFERENCES drv (seq),
        job INTEGER NOT NULL REFERENCES job (seq),
        PRIMARY KEY (needs, job)
    ) WITHOUT ROWID""",
    """CREATE TABLE requester (
        submission INTEGER NOT NULL REFERENCES submission (seq),
        job INTEGER NOT NULL REFERENCES job (seq),
        PRIMARY KEY (submission, job)
    ) WITHOUT ROWID""",
    "CREATE INDEX requester_job ON requester (job)",
    # Jobs that a staging submission had written and another took over meanwhile.
    """CREATE TABLE taken_over (
        submission INTEGER NOT NULL REFERENCES submission (seq),
        job INTEGER NOT NULL REFERENCES job (seq),
        PRIMARY KEY (submission, job)
    ) WITHOUT ROWID""",
    """CREATE TABLE dispatched_job (
        id TEXT PRIMARY KEY NOT NULL,
        job TEXT NOT NULL REFERENCES job (id),
        worker TEXT NOT NULL,
        session TEXT NOT NULL,
        server TEXT NOT NULL REFERENCES server (id),
        claimed_at REAL NOT NULL,
        closed_at REAL,
        outcome TEXT,
        error TEXT,
        score BLOB,
        cluster_attempt TEXT REFERENCES cluster_attempt (id)
    )""",
    # At most one open claim of a job: the arbiter between servers.
    "CREATE UNIQUE INDEX dispatched_job_open ON dispatched_job (job) WHERE closed_at IS NULL",
    "CREATE INDEX dispatched_job_history ON dispatched_job (job, claimed_at)",
    """CREATE TABLE cluster_job (
        id TEXT PRIMARY KEY NOT NULL,
        project TEXT NOT NULL REFERENCES project (id),
        status TEXT NOT NULL,
        same_zone INTEGER NOT NULL,
        retry_budget INTEGER NOT NULL,
        attempts INTEGER NOT NULL,
        prioritized INTEGER NOT NULL,
        created_at REAL NOT NULL,
        ended_at REAL,
        submission INTEGER NOT NULL REFERENCES submission (seq)
    )""",
    """CREATE TABLE cluster_member (
        cluster TEXT NOT NULL REFERENCES cluster_job (id),
        role TEXT NOT NULL,
        number INTEGER NOT NULL,
        job TEXT NOT NULL UNIQUE REFERENCES job (id),
        is_primary INTEGER NOT NULL,
        pin TEXT,
        PRIMARY KEY (cluster, role, number)
    ) WITHOUT ROWID""",
    """CREATE TABLE cluster_attempt (
        id TEXT PRIMARY KEY NOT NULL,
        cluster TEXT NOT NULL REFERENCES cluster_job (id),
        server TEXT NOT NULL REFERENCES server (id),
        created_at REAL NOT NULL,
        started_at REAL,
        finished_at REAL,
        outcome TEXT
    )""",
    """CREATE UNIQUE INDEX cluster_attempt_open ON cluster_attempt (cluster)
        WHERE finished_at IS NULL""",
    """CREATE TABLE build_metric (
        assignment TEXT PRIMARY KEY NOT NULL REFERENCES dispatched_job (id),
        package TEXT NOT NULL,
        system TEXT NOT NULL,
        at REAL NOT NULL,
        wall_time_ms INTEGER,
        cpu_time_ms INTEGER,
        peak_ram_mb INTEGER,
        output_nar_size INTEGER,
        oom INTEGER NOT NULL,
        contention REAL NOT NULL,
        core_score REAL
    )""",
    # The newest builds of each package, read by a starting server.
    "CREATE INDEX build_metric_package ON build_metric (package, system, at)",
    """CREATE TABLE store_path (
        path TEXT PRIMARY KEY NOT NULL,
        nar_size INTEGER,
        nar_hash TEXT
    ) WITHOUT ROWID""",
    """CREATE TABLE cordon (
        worker TEXT PRIMARY KEY NOT NULL,
        since REAL NOT NULL,
        reason TEXT NOT NULL
    )""",
    """CREATE TABLE eval_message (
        seq INTEGER PRIMARY KEY,
        job INTEGER NOT NULL REFERENCES job (seq),
        severity TEXT NOT NULL CHECK (severity IN ('warning', 'error')),
        message TEXT NOT NULL
    )""",
    "CREATE INDEX eval_message_job ON eval_message (job)",
    f"PRAGMA application_id = {APPLICATION_ID}",
)

_V2 = (
    # Who was here, for jobs that nobody who is here can run.
    """CREATE TABLE worker (
        id TEXT PRIMARY KEY NOT NULL,
        name TEXT NOT NULL,
        capabilities BLOB NOT NULL,
        last_seen REAL NOT NULL
    )""",
    # Evaluations (system '') of the last week, and builds to forget, by time.
    "CREATE INDEX build_metric_at ON build_metric (system, at)",
)

_V3 = (
    """CREATE TABLE prefetch (
        seq INTEGER PRIMARY KEY,
        paths INTEGER NOT NULL,
        secs REAL NOT NULL
    )""",
)

_V4 = (
    # A metric outlives its claim: scoring reads 90 days of them.
    "ALTER TABLE build_metric RENAME TO build_metric_v3",
    """CREATE TABLE build_metric (
        assignment TEXT PRIMARY KEY NOT NULL,
        package TEXT NOT NULL,
        system TEXT NOT NULL,
        at REAL NOT NULL,
        wall_time_ms INTEGER,
        cpu_time_ms INTEGER,
        peak_ram_mb INTEGER,
        output_nar_size INTEGER,
        oom INTEGER NOT NULL,
        contention REAL NOT NULL,
        core_score REAL
    )""",
    "INSERT INTO build_metric SELECT * FROM build_metric_v3",
    "DROP TABLE build_metric_v3",
    "CREATE INDEX build_metric_package ON build_metric (package, system, at)",
    "CREATE INDEX build_metric_at ON build_metric (system, at)",
    # What is too old to be read is deleted.
    "CREATE INDEX build_metric_age ON build_metric (at)",
)

_V5 = (
    """CREATE TABLE eval_target (
        job INTEGER NOT NULL REFERENCES job (seq),
        attribute TEXT NOT NULL,
        drv_path TEXT NOT NULL,
        PRIMARY KEY (job, attribute)
    ) WITHOUT ROWID""",
)

_V6 = (
    # A job may be submitted again in another cluster once the first has ended.
    "ALTER TABLE cluster_member RENAME TO cluster_member_v5",
    """CREATE TABLE cluster_member (
        cluster TEXT NOT NULL REFERENCES cluster_job (id),
        role TEXT NOT NULL,
        number INTEGER NOT NULL,
        job TEXT NOT NULL REFERENCES job (id),
        is_primary INTEGER NOT NULL,
        pin TEXT,
        PRIMARY KEY (cluster, role, number)
    ) WITHOUT ROWID""",
    """INSERT INTO cluster_member (cluster, role, number, job, is_primary, pin)
        SELECT cluster, role, number, job, is_primary, pin FROM cluster_member_v5""",
    "DROP TABLE cluster_member_v5",
    # Whether a job is a member of an open cluster, read with every job.
    "CREATE INDEX cluster_member_job ON cluster_member (job)",
    "ALTER TABLE cluster_job ADD COLUMN changed_at REAL NOT NULL DEFAULT 0",
    "ALTER TABLE cluster_job ADD COLUMN changed_by INTEGER REFERENCES server (seq)",
    # Read by the other servers at their tick.
    "CREATE INDEX cluster_job_changed ON cluster_job (changed_by, changed_at)",
    # Read by a starting server.
    "CREATE INDEX cluster_job_ended ON cluster_job (ended_at)",
    "CREATE INDEX cluster_attempt_history ON cluster_attempt (cluster, created_at)",
    # The seats of an attempt; single claims are not in it.
    """CREATE INDEX dispatched_job_attempt ON dispatched_job (cluster_attempt)
        WHERE cluster_attempt IS NOT NULL""",
)

_V7 = (
    # A claim writes four pages instead of nine: nothing of it is kept in order of its id, and it
    # changes no index of `job`. A claim is closed by its job, through the index of open claims.
    "ALTER TABLE dispatched_job RENAME TO dispatched_job_v6",
    """CREATE TABLE dispatched_job (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL,
        job TEXT NOT NULL REFERENCES job (id),
        worker TEXT NOT NULL,
        session TEXT NOT NULL,
        server TEXT NOT NULL REFERENCES server (id),
        claimed_at REAL NOT NULL,
        closed_at REAL,
        outcome TEXT,
        error TEXT,
        score BLOB,
        cluster_attempt TEXT REFERENCES cluster_attempt (id)
    )""",
    """INSERT INTO dispatched_job (id, job, worker, session, server, claimed_at, closed_at, outcome,
            error, score, cluster_attempt)
        SELECT id, job, worker, session, server, claimed_at, closed_at, outcome, error, score,
            cluster_attempt
        FROM dispatched_job_v6 ORDER BY claimed_at, id""",
    "DROP TABLE dispatched_job_v6",
    "CREATE UNIQUE INDEX dispatched_job_open ON dispatched_job (job) WHERE closed_at IS NULL",
    "CREATE INDEX dispatched_job_history ON dispatched_job (job, claimed_at)",
    """CREATE INDEX dispatched_job_attempt ON dispatched_job (cluster_attempt)
        WHERE cluster_attempt IS NOT NULL""",
    "DROP INDEX job_status",
    # What has not ended: read by a starting server. Each status of it changes often.
    "CREATE INDEX job_open ON job (id) WHERE ended_at IS NULL",
    "CREATE INDEX job_ended ON job (status, id) WHERE ended_at IS NOT NULL",
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (_V1, _V2, _V3, _V4, _V5, _V6, _V7)


def version_of(db: sqlite3.Connection) -> int:
    """Schema version of the file, 0 for an empty one.

    Raises: LedgerTooNew if it is newer than this program.
    """
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise LedgerTooNew(
            f"schema version {version} is newer than this program's {len(MIGRATIONS)};"
            " upgrade headrace"
        )
    return version


def migrate(db: sqlite3.Connection) -> None:
    """Brings the file to the newest version; to be called within a transaction."""
    for version in range(version_of(db), len(MIGRATIONS)):
        for statement in MIGRATIONS[version]:
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {version + 1}")
