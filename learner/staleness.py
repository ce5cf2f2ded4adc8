"""How far rollouts may run ahead of training, in policy versions. Pure functions.

A batch that is consumed at version n trains on episodes whose oldest token is of version
n - max_staleness or newer. Batches are numbered by the version that consumes them.
"""


def may_start(
    *,
    version: int,
    batches_assembled: int,
    episodes_alive: int,
    group_size: int,
    batch_episodes: int,
    max_staleness: int,
    updates: int,
) -> bool:
    """Whether one more group could still be consumed in time.

    `episodes_alive` are handed out or buffered, `batches_assembled` were taken already. All of them
    together must fit into the batches of versions up to `version + max_staleness`, and never beyond
    the last update of the run.
    """
    consumable = min(version + max_staleness + 1, updates) * batch_episodes
    return batches_assembled * batch_episodes + episodes_alive + group_size <= consumable


def in_time(version: int, batches_assembled: int, max_staleness: int) -> bool:
    """Whether an episode that starts at `version` can be young enough for the next batch.

    It cannot while a resumed learner repeats updates that were done before a crash.
    """
    return batches_assembled - version <= max_staleness


def is_stale(min_version: int, consumed_at: int, max_staleness: int) -> bool:
    """Whether an episode whose oldest token is of `min_version` is too old for that update."""
    return consumed_at - min_version > max_staleness
