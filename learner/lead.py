"""A learner of several ranks as one trainer: what rank 0 is asked, all ranks do."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from capo.configs.schema import RunConfig
from capo.learner.episodes import Episode
from capo.learner.orders import End, GatherWeights, Load, Open, Orders, Save, Score, Update
from capo.learner.results import UpdateResult
from capo.learner.trainer import Trainer
from capo.protocol.errors import CheckpointError, ConfigError
from capo.protocol.records import IntArray


class Lead:
    """A `Trainer` on rank 0 whose every call the other ranks, which `follow`, make too.

    The contract is `Trainer`'s; RankLostError besides, where another rank is gone.
    """

    def __init__(self, config: RunConfig, policy_dir: Path, orders: Orders) -> None:
        self._orders = orders
        orders.give(Open(config, str(policy_dir.resolve())))
        self._trainer = Trainer(config, policy_dir)

    @property
    def version(self) -> int:
        return self._trainer.version

    @property
    def vocabulary_size(self) -> int:
        return self._trainer.vocabulary_size

    @property
    def checkpoint_bytes(self) -> int:
        return self._trainer.checkpoint_bytes

    def update(self, episodes: Sequence[Episode], version: int) -> UpdateResult:
        self._orders.give(Update(version, tuple(episodes)))
        return self._trainer.update(episodes, version)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gathers nothing before the first tensor is taken; all of them have to be taken then."""
        self._orders.give(GatherWeights())
        yield from self._trainer.weights()

    def logprobs(self, tokens: IntArray | Sequence[int]) -> Tensor:
        sequence = np.ascontiguousarray(tokens, dtype=np.int32)
        self._orders.give(Score(sequence))
        return self._trainer.logprobs(sequence)

    def save(self, folder: Path) -> None:
        self._orders.give(Save(str(folder.resolve())))
        self._trainer.save(folder)

    def load(self, folder: Path) -> None:
        self._orders.give(Load(str(folder.resolve())))
        self._trainer.load(folder)


def open_trainer(config: RunConfig, policy_dir: Path, orders: Orders | None) -> Trainer | Lead:
    """`orders` where this process leads other ranks."""
    return Trainer(config, policy_dir) if orders is None else Lead(config, policy_dir, orders)


def follow(orders: Orders) -> None:
    """Do what rank 0 says until it says that this was all.

    Raises RankLostError where rank 0 is gone. What it alone could mend it is left to raise: then
    this rank waits for its next order, with everything as it was.
    """
    trainer: Trainer | None = None
    while not isinstance(order := orders.take(), End):
        try:
            if isinstance(order, Open):
                trainer = None  # its memory is needed for the next
                trainer = Trainer(order.config, Path(order.policy_dir))
            else:
                assert trainer is not None, f"{type(order).__name__} was ordered before Open"
                _obey(order, trainer)
        except (ValueError, OSError, CheckpointError, ConfigError):
            continue  # every rank raises it, and rank 0 decides what follows


def _obey(order: Update | GatherWeights | Score | Save | Load, trainer: Trainer) -> None:
    match order:
        case Update(version, episodes):
            trainer.update(episodes, version)
        case GatherWeights():
            for _ in trainer.weights():
                pass
        case Score(tokens):
            trainer.logprobs(tokens)
        case Save(folder):
            trainer.save(Path(folder))
        case Load(folder):
            trainer.load(Path(folder))
