"""Which episodes form which minibatch, and how each one is cut into this rank's microbatches.

K actions of the whole batch, k of one minibatch. Everything follows from the batch and named seeds.
"""

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from capo.learner.batch import Batch, Integers
from capo.learner.microbatch import Microbatch, collate
from capo.learner.packing import pack
from capo.learner.ranks import Ranks
from capo.learner.seeds import derive_seed


class Minibatch(Struct, frozen=True):
    """One optimizer step. Ranks have the same minibatches and different microbatches."""

    epoch: int
    episodes: Integers  # into the batch's episodes, ascending
    actions: Integers  # [k], into the batch's actions, ascending
    microbatches: tuple[Microbatch, ...]  # of this rank, at least one

    def positions(self, actions: Tensor) -> Tensor:
        """Where batch-wide action indices stand among this minibatch's actions."""
        ascending = torch.from_numpy(self.actions).to(actions.device)
        return torch.searchsorted(ascending, actions)


def plan_minibatches(
    batch: Batch,
    ranks: Ranks,
    *,
    minibatches: int,
    epochs: int,
    token_budget: int,
    seed: int,
    version: int,
) -> tuple[Minibatch, ...]:
    """The optimizer steps of one update, in order.

    Episodes are reshuffled for every epoch and cut as evenly as their number allows; cuts
    without an action are left out. Raises ValueError for a segment longer than the token budget.
    """
    planned: list[Minibatch] = []
    for epoch in range(epochs):
        generator = np.random.default_rng(derive_seed(seed, "minibatches", version, epoch))
        order = generator.permutation(len(batch.episodes))
        for episodes in np.array_split(order, minibatches):
            chosen = np.sort(episodes)
            actions = np.flatnonzero(np.isin(batch.episode_of_action, chosen))
            if len(actions):
                microbatches = _microbatches(batch, chosen, token_budget, ranks)
                planned.append(Minibatch(epoch, chosen, actions, microbatches))
    return tuple(planned)


def _microbatches(
    batch: Batch, episodes: Integers, token_budget: int, ranks: Ranks
) -> tuple[Microbatch, ...]:
    placed = [one for episode in episodes for one in batch.segments[episode]]
    lengths = [len(one.segment.token_ids) for one in placed]
    plan = pack(lengths, token_budget, ranks.world_size)[ranks.rank]
    return tuple(collate([placed[index] for index in chosen], ranks.device) for chosen in plan)
