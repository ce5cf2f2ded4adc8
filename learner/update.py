"""One update: a batch of episodes at policy version n becomes optimizer steps and a record of them.

E episodes, K actions, N trained tokens. Composes the passes over the models with the numerics;
branches on what an algorithm needs, never on which one it is.
"""

from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from capo.configs.algorithms import AlgorithmConfig, critic_reads, needs_entropy
from capo.configs.schema import RunConfig
from capo.learner.batch import Batch, build_batch
from capo.learner.behaviour import Correction, correct_behaviour
from capo.learner.clock import Clock
from capo.learner.credit import Experience, Targets, assign_credit
from capo.learner.engines import TrainEngine
from capo.learner.episodes import Episode
from capo.learner.minibatches import Minibatch, plan_minibatches
from capo.learner.model import CriticModel, PolicyModel
from capo.learner.optimizer_steps import CriticStep, critic_step, policy_step
from capo.learner.passes import Scores, Values, read_values, score
from capo.learner.policy_inputs import PolicyInputs
from capo.learner.ranks import Ranks
from capo.learner.results import UpdateResult
from capo.learner.schedule import learning_rate
from capo.learner.summary import Step, action_results, minibatch_result, update_metrics


class Models(Struct, frozen=True):
    """What an update reads and trains. No critic and no reference where none is needed."""

    policy: TrainEngine[PolicyModel]
    critic: TrainEngine[CriticModel] | None
    reference: PolicyModel | None


class Readings(Struct, frozen=True):
    """What the models say of the batch before the first step."""

    proximal: Scores
    reference: Scores | None
    values: Values | None


def run_update(
    episodes: Sequence[Episode], version: int, models: Models, config: RunConfig, ranks: Ranks
) -> UpdateResult:
    """Trains `models` in place.

    All ranks call it with the same episodes, in any order, and get the same result. Raises
    ValueError for episodes that cannot be trained on, before anything has changed.
    """
    clock = Clock()
    learner, algorithm = config.learner, config.algorithm
    with clock.phase("pack"):
        batch = build_batch(episodes)
        minibatches = plan_minibatches(
            batch,
            ranks,
            minibatches=learner.minibatches,
            epochs=learner.epochs,
            token_budget=learner.token_budget,
            seed=config.seed,
            version=version,
        )
    readings = _read(batch, minibatches, models, config, ranks, clock)
    with clock.phase("credit"):
        correction = _correction(batch, readings.proximal, algorithm)
        targets = assign_credit(_experience(batch, readings.values, correction), algorithm)
        inputs = _policy_inputs(batch, readings, correction, targets, algorithm)
    steps: list[Step] = []
    for number, minibatch in enumerate(minibatches):
        with clock.phase("policy"):
            policy = policy_step(
                models.policy,
                minibatch,
                inputs,
                algorithm,
                ranks,
                temperature=config.rollout.temperature,
                lr=policy_learning_rate(config, version, number),
                moved=number > 0,
            )
        critic: CriticStep | None = None
        if models.critic is not None:
            with clock.phase("critic"):
                critic = _critic_step(batch, minibatch, models, readings, targets, config, ranks)
        steps.append(Step(minibatch, policy, critic))

    with clock.phase("record"):
        actions = action_results(batch, correction, targets, readings.values)
        return UpdateResult(
            version=version,
            episode_ids=tuple(episode.episode_id for episode in batch.episodes),
            actions=actions,
            minibatches=tuple(minibatch_result(step) for step in steps),
            metrics=update_metrics(batch, version, actions, steps, readings.proximal, correction),
            phases=clock.seconds,
        )


def policy_learning_rate(config: RunConfig, version: int, number: int) -> float:
    """Of the `number`-th optimizer step of the update that starts from `version`."""
    learner = config.learner
    per_update = learner.minibatches * learner.epochs
    return learning_rate(
        version * per_update + number,
        base=learner.policy_lr,
        warmup_steps=learner.policy_warmup_steps,
        total_steps=config.updates * per_update,
        final_factor=learner.policy_final_lr_factor,
    )


def _read(
    batch: Batch,
    minibatches: Sequence[Minibatch],
    models: Models,
    config: RunConfig,
    ranks: Ranks,
    clock: Clock,
) -> Readings:
    temperature = config.rollout.temperature
    # In the very microbatches that train first, so that z is exactly 0 before the first step.
    first = [one for part in minibatches if part.epoch == 0 for one in part.microbatches]
    with clock.phase("proximal"):
        proximal = score(
            models.policy.model, first, batch.num_tokens, temperature, ranks, with_entropy=True
        )
    reference: Scores | None = None
    if models.reference is not None:
        with clock.phase("reference"):
            reference = score(models.reference, first, batch.num_tokens, temperature, ranks)
    values: Values | None = None
    reads = critic_reads(config.algorithm)
    if models.critic is not None and reads != "none":
        with clock.phase("values"):
            values = read_values(
                models.critic.model, batch, reads, config.learner.token_budget, ranks
            )
    return Readings(proximal, reference, values)


def _critic_step(
    batch: Batch,
    minibatch: Minibatch,
    models: Models,
    readings: Readings,
    targets: Targets,
    config: RunConfig,
    ranks: Ranks,
) -> CriticStep | None:
    reads, values = critic_reads(config.algorithm), readings.values
    if models.critic is None or values is None or reads == "none":
        return None
    assert targets.returns is not None
    return critic_step(
        models.critic,
        minibatch,
        values.readings,
        targets.returns.to(values.readings),
        ranks,
        reads=reads,
        num_readings=_num_readings(batch, minibatch, reads),
        clip=config.algorithm.value_clip,
        lr=config.learner.critic_lr,
    )


def _correction(batch: Batch, proximal: Scores, algorithm: AlgorithmConfig) -> Correction:
    return correct_behaviour(
        _float64(proximal.logprobs),
        _float64(batch.behaviour_logprobs),
        torch.from_numpy(batch.action_of_token),
        batch.num_actions,
        algorithm,
    )


def _experience(batch: Batch, values: Values | None, correction: Correction) -> Experience:
    groups = sorted({episode.group_id for episode in batch.episodes})
    number = {group: index for index, group in enumerate(groups)}
    return Experience(
        rewards=_float64(batch.rewards),
        episode_of_action=torch.from_numpy(batch.episode_of_action),
        action_of_token=torch.from_numpy(batch.action_of_token),
        terminated=torch.tensor([episode.terminated for episode in batch.episodes]),
        group_of_episode=torch.tensor([number[one.group_id] for one in batch.episodes]),
        state_keys=batch.state_keys,
        values=None if values is None else _float64(values.readings),
        bootstrap_values=None if values is None else _float64(values.bootstraps),
        log_weights=correction.log_weights,
    )


def _policy_inputs(
    batch: Batch,
    readings: Readings,
    correction: Correction,
    targets: Targets,
    algorithm: AlgorithmConfig,
) -> PolicyInputs:
    """The frozen side of the loss, on the device and in the dtype of the log-probs."""
    logprobs, reference = readings.proximal.logprobs, readings.reference

    def floats(values: Tensor) -> Tensor:
        return values.to(logprobs)

    def here(values: Tensor) -> Tensor:
        return values.to(logprobs.device)

    entropies: Tensor | None = None
    if needs_entropy(algorithm):
        if batch.entropies is None:
            raise ValueError(
                f"{algorithm.preset} needs the behaviour policy's entropy per token, but some "
                "steps carry none; set rollout.record_entropy = true"
            )
        entropies = floats(torch.from_numpy(batch.entropies))
    return PolicyInputs(
        action_of_token=here(torch.from_numpy(batch.action_of_token)),
        proximal_logprobs=logprobs,
        behaviour_logprobs=floats(torch.from_numpy(batch.behaviour_logprobs)),
        reference_logprobs=None if reference is None else reference.logprobs,
        entropies=entropies,
        advantages=floats(targets.advantages),
        token_advantages=floats(targets.token_advantages),
        token_weights=floats(correction.token_weights),
        token_kept=here(correction.token_kept),
        action_weights=floats(correction.action_weights),
        action_kept=here(correction.action_kept),
        counted=here(targets.counted),
    )


def _num_readings(batch: Batch, minibatch: Minibatch, reads: str) -> int:
    if reads == "boundary":
        return len(minibatch.actions)
    return int(batch.lengths[minibatch.actions].sum())


def _float64(values: Tensor | NDArray[np.float32] | NDArray[np.float64]) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return tensor.detach().to("cpu", torch.float64)
