"""The tables of a run file, and what marks a file as one.

Column meanings for users: docs/run_file.md. Token blobs are little-endian int32, log-probs and
entropies little-endian float32; spans and dictionaries are JSON, so that SQL can read them.
"""

FILE_NAME = "run.sqlite"
APPLICATION_ID = 0x4341504F  # "CAPO", in SQLite's header
SCHEMA_VERSION = 1

TABLES = """
CREATE TABLE run (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE tasks (
    id      TEXT PRIMARY KEY,
    payload BLOB NOT NULL
);

CREATE TABLE actors (
    actor_id      TEXT PRIMARY KEY,
    name          TEXT NOT NULL,
    last_sequence INTEGER NOT NULL,
    first_seen    REAL NOT NULL,
    last_seen     REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE leases (               -- one row per attempt
    episode_id     TEXT PRIMARY KEY,
    lease_id       TEXT NOT NULL,
    attempt        INTEGER NOT NULL,
    number         INTEGER NOT NULL,
    task_id        TEXT NOT NULL,
    group_id       TEXT NOT NULL,
    member         INTEGER NOT NULL,
    purpose        TEXT NOT NULL,
    seed           INTEGER NOT NULL,
    policy_version INTEGER NOT NULL,
    actor_id       TEXT NOT NULL,
    status         TEXT NOT NULL,   -- playing, an EpisodeStatus, unreceived, closed
    granted_at     REAL NOT NULL,
    ended_at       REAL
);
CREATE INDEX leases_by_lease ON leases (lease_id, attempt);
CREATE INDEX leases_playing ON leases (status) WHERE status = 'playing';

CREATE TABLE episodes (             -- written when an episode ends
    arrival           INTEGER PRIMARY KEY,
    episode_id        TEXT NOT NULL UNIQUE,
    lease_id          TEXT NOT NULL,
    attempt           INTEGER NOT NULL,
    actor_id          TEXT NOT NULL,
    purpose           TEXT NOT NULL,
    status            TEXT NOT NULL,
    outcome           REAL NOT NULL,
    episode_return    REAL NOT NULL,
    num_steps         INTEGER NOT NULL,
    num_action_tokens INTEGER NOT NULL,
    min_version       INTEGER,
    max_version       INTEGER,
    final_keep        INTEGER NOT NULL,
    final_observation BLOB,
    metrics           TEXT NOT NULL,
    error             TEXT NOT NULL,
    received_at       REAL NOT NULL,
    consumed_by       INTEGER,      -- updates.version
    excluded          TEXT NOT NULL -- why it is no training data, '' = it is
);
CREATE INDEX episodes_waiting ON episodes (arrival)
    WHERE consumed_by IS NULL AND excluded = '' AND purpose = 'train';
CREATE INDEX episodes_by_update ON episodes (consumed_by) WHERE consumed_by IS NOT NULL;

CREATE TABLE steps (
    episode_id         TEXT NOT NULL,
    step_index         INTEGER NOT NULL,
    keep               INTEGER NOT NULL,
    num_action_tokens  INTEGER NOT NULL,
    min_version        INTEGER NOT NULL,
    max_version        INTEGER NOT NULL,
    reward             REAL NOT NULL,
    state_key          TEXT NOT NULL,
    versions           TEXT NOT NULL,
    info               TEXT NOT NULL,
    observation        BLOB NOT NULL,
    action             BLOB NOT NULL,
    behaviour_logprobs BLOB NOT NULL,
    entropies          BLOB,
    PRIMARY KEY (episode_id, step_index)
);

CREATE TABLE updates (
    version     INTEGER PRIMARY KEY, -- the policy that the update started from
    status      TEXT NOT NULL,       -- taken, done
    episode_ids TEXT NOT NULL,       -- JSON list, in training order
    seeds       TEXT NOT NULL,       -- JSON object
    metrics     TEXT NOT NULL,       -- JSON object
    result      BLOB,                -- capo.learner.results
    taken_at    REAL NOT NULL,
    done_at     REAL
);

CREATE TABLE weights (
    version  INTEGER PRIMARY KEY,
    folder   TEXT NOT NULL,
    digest   TEXT NOT NULL,
    saved_at REAL NOT NULL
);

CREATE TABLE evaluations (
    number      INTEGER PRIMARY KEY,
    version     INTEGER NOT NULL,
    modes       TEXT NOT NULL,       -- JSON list
    task_ids    TEXT NOT NULL,       -- JSON list
    started_at  REAL NOT NULL,
    finished_at REAL,
    results     TEXT NOT NULL        -- JSON object by mode
);
"""
