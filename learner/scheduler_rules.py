"""What the configuration says about scheduling."""

from msgspec import Struct

from capo.configs.schema import RunConfig


class SchedulerRules(Struct, frozen=True, kw_only=True):
    """The meaning of each is in configs/schema.py."""

    seed: int
    updates: int
    batch_episodes: int
    group_size: int = 1
    max_staleness: int = 0
    max_flat_batches: int = 0
    max_attempts: int = 3
    max_error_fraction: float = 0.5
    error_window: int = 256

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.batch_episodes % self.group_size:
            raise ValueError(
                f"batches of {self.batch_episodes} episodes cannot hold whole groups of "
                f"{self.group_size}"
            )

    @classmethod
    def from_config(cls, config: RunConfig) -> "SchedulerRules":
        scheduler = config.scheduler
        return cls(
            seed=config.seed,
            updates=config.updates,
            batch_episodes=config.learner.batch_episodes,
            group_size=scheduler.group_size,
            max_staleness=scheduler.max_staleness,
            max_flat_batches=scheduler.max_flat_batches,
            max_attempts=scheduler.max_attempts,
            max_error_fraction=scheduler.max_error_fraction,
            error_window=scheduler.error_window,
        )
