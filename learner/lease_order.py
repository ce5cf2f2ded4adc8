"""Which task every training lease plays: a pure function of the run's seed and the lease's number.

Lease `number` is member `number % group_size` of group `number // group_size`. Group g plays
the task at place `g % num_tasks` of pass `g // num_tasks`, and every pass is its own permutation of
the tasks. So the data cursor of a run is one number.
"""

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from capo.learner.seeds import derive_seed
from capo.protocol.errors import ConfigError
from capo.protocol.records import Purpose, Task


class LeasePlan(Struct, frozen=True, kw_only=True):
    """A lease before anybody plays it. `number` orders the leases of one purpose."""

    number: int
    lease_id: str
    task: Task
    group_id: str
    member: int
    purpose: Purpose
    seed: int


class LeaseOrder:
    """The endless order of training leases over a fixed sequence of tasks."""

    def __init__(self, tasks: Sequence[Task], seed: int, group_size: int) -> None:
        if not tasks:
            raise ConfigError("The environment has no training tasks: check [environment.options].")
        self._tasks = tasks
        self._seed = seed
        self._group_size = group_size
        self._permutation = functools.lru_cache(maxsize=2)(self._permute)

    def group(self, group: int) -> list[LeasePlan]:
        """The leases of one group, by member."""
        turn, place = divmod(group, len(self._tasks))
        task = self._tasks[self._permutation(turn)[place]]
        first = group * self._group_size
        return [
            LeasePlan(
                number=first + member,
                lease_id=f"t{first + member:08d}",
                task=task,
                group_id=f"g{group:08d}",
                member=member,
                purpose=Purpose.TRAIN,
                seed=derive_seed(self._seed, "lease", first + member),
            )
            for member in range(self._group_size)
        ]

    def _permute(self, turn: int) -> list[int]:
        generator = np.random.default_rng(derive_seed(self._seed, "task-order", turn))
        order: list[int] = generator.permutation(len(self._tasks)).tolist()
        return order


def evaluation_leases(
    tasks: Sequence[Task], mode: str, evaluation: int, seed: int
) -> list[LeasePlan]:
    """One lease per task. Seeds depend on the place alone, so that evaluations can be compared."""
    return [
        LeasePlan(
            number=index,
            lease_id=f"e{evaluation:04d}-{mode}-{index:05d}",
            task=task,
            group_id=f"e{evaluation:04d}-{mode}-{index:05d}",
            member=0,
            purpose=Purpose(f"eval_{mode}"),
            seed=derive_seed(seed, "evaluation", index),
        )
        for index, task in enumerate(tasks)
    ]


def tasks_digest(tasks: Sequence[Task]) -> str:
    """Equal for equal tasks in equal order."""
    digest = hashlib.sha256()
    for task in tasks:
        for part in (task.id.encode(), task.payload):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()
