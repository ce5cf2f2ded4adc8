"""However a minibatch's actions are dealt to ranks and microbatches: the same step."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from capo.configs.algorithms import critic_reads, needs_critic, resolve
from capo.configs.presets import PRESETS
from capo.learner.microbatch import Microbatch
from capo.learner.minibatches import Minibatch
from capo.learner.optimizer_steps import CriticStep, PolicyStep, critic_step, policy_step
from tests.learner.policy_cases import Case
from tests.learner.rank_threads import TableEngine, on_ranks
from tests.recorded import close

EXACT = {"rtol": 1e-9, "atol": 1e-12}
CRITICS = sorted(name for name in PRESETS if needs_critic(resolve(name)))

Split = Sequence[Sequence[Sequence[int]]]  # [rank][microbatch] -> actions

ragged = st.lists(st.integers(1, 6), min_size=1, max_size=8)
seeds = st.integers(0, 2**31)


def split(actions: Sequence[int], ranks: int, microbatches: int, seed: int) -> Split:
    """Actions dealt at random, in random order; some microbatches may be empty, or all of a
    rank's."""
    generator = np.random.default_rng(seed)
    parts: list[list[list[int]]] = [[[] for _ in range(microbatches)] for _ in range(ranks)]
    for action in generator.permutation(actions).tolist():
        parts[generator.integers(ranks)][generator.integers(microbatches)].append(action)
    return parts


def minibatch(case: Case, actions: Sequence[int], parts: Sequence[Sequence[int]]) -> Minibatch:
    """One rank's share. Positions are the numbers of the batch's readings."""
    return Minibatch(
        epoch=0,
        episodes=np.zeros(0, dtype=np.int64),
        actions=np.array(sorted(actions), dtype=np.int64),
        microbatches=tuple(microbatch(case, part) for part in parts),
    )


def microbatch(case: Case, actions: Sequence[int]) -> Microbatch:
    chosen = torch.tensor(actions, dtype=torch.int64)
    tokens = [torch.nonzero(case.index == action)[:, 0] for action in actions]
    flat = torch.cat([*tokens, torch.zeros(0, dtype=torch.int64)])
    return Microbatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.zeros(2, dtype=torch.int32),
        max_length=1,
        predictors=flat,
        labels=flat,
        action_of_token=torch.arange(len(actions)).repeat_interleave(
            torch.tensor([len(one) for one in tokens], dtype=torch.int64)
        ),
        boundaries=chosen,
        actions=chosen,
        tokens=flat,
        last_tokens=torch.zeros(1, dtype=torch.int64),
    )


@pytest.mark.parametrize("preset", sorted(PRESETS))
@given(
    lengths=ragged,
    seed=seeds,
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 3),
    moved=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_the_policy_s_step_is_the_same_for_every_split(
    preset: str, lengths: list[int], seed: int, ranks: int, microbatches: int, moved: bool
) -> None:
    algorithm = resolve(preset)
    case = Case(lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    counted = torch.rand(len(lengths), generator=generator) < 0.8
    inputs = case.inputs(algorithm, counted=counted)
    actions = _some(len(lengths), seed)
    table = case.current if moved else case.proximal

    def step(parts: Split) -> list[tuple[PolicyStep, Tensor]]:
        def on_rank(ranks: Any) -> tuple[PolicyStep, Tensor]:
            engine: Any = TableEngine(table, ranks)
            mine = minibatch(case, actions, parts[ranks.rank])
            step = policy_step(
                engine, mine, inputs, algorithm, ranks, temperature=1.0, lr=1.0, moved=moved
            )
            return step, engine.gradient

        return on_ranks(len(parts), on_rank)

    ((whole, gradient),) = step([[actions]])
    for found, found_gradient in step(split(actions, ranks, microbatches, seed)):
        for name in ("mu", "loss", "kl", "grad_norm", "columns"):
            close(getattr(found, name), getattr(whole, name), **EXACT)
        close(found_gradient, gradient, **EXACT)


@pytest.mark.parametrize("preset", CRITICS)
@given(lengths=ragged, seed=seeds, ranks=st.integers(1, 4), microbatches=st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_the_critic_s_step_is_the_same_for_every_split(
    preset: str, lengths: list[int], seed: int, ranks: int, microbatches: int
) -> None:
    algorithm = resolve(preset)
    reads = critic_reads(algorithm)
    case = Case(lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    size = len(lengths) if reads == "boundary" else sum(lengths)
    values, old_values, returns = torch.randn(3, size, generator=generator, dtype=torch.float64)
    actions = _some(len(lengths), seed)
    num_readings = len(actions) if reads == "boundary" else sum(lengths[one] for one in actions)

    def step(parts: Split) -> list[tuple[CriticStep, Tensor]]:
        def on_rank(ranks: Any) -> tuple[CriticStep, Tensor]:
            engine: Any = TableEngine(values, ranks)
            step = critic_step(
                engine,
                minibatch(case, actions, parts[ranks.rank]),
                old_values,
                returns,
                ranks,
                reads="boundary" if reads == "boundary" else "token",
                num_readings=num_readings,
                clip=algorithm.value_clip,
                lr=1.0,
            )
            return step, engine.gradient

        return on_ranks(len(parts), on_rank)

    ((whole, gradient),) = step([[actions]])
    for found, found_gradient in step(split(actions, ranks, microbatches, seed)):
        for name in ("loss", "clipped", "grad_norm"):
            close(getattr(found, name), getattr(whole, name), **EXACT)
        close(found_gradient, gradient, **EXACT)


def _some(count: int, seed: int) -> list[int]:
    """At least one of so many actions, ascending: a minibatch of a batch."""
    generator = np.random.default_rng(seed)
    chosen = generator.choice(count, generator.integers(1, count + 1), replace=False)
    return sorted(chosen.tolist())
