"""What a run will need, from its configuration alone: parameters, memory, tokens, versions."""

from collections.abc import Iterator
from pathlib import Path

from capo.configs.algorithms import needs_critic, needs_reference
from capo.configs.schema import RunConfig
from capo.launch.decoder_shape import read_shape, tiny_shape

_BYTES = {"float32": 4, "bfloat16": 2}
_WEIGHT_BYTES, _GRADIENT_BYTES, _MOMENT_BYTES = 4, 4, 8  # of a learner, in float32 whatever dtype


def plan_lines(config: RunConfig) -> Iterator[str]:
    """Sentences for `capo check`, one per thing that a run needs or promises."""
    yield from _model_lines(config)
    yield from _update_lines(config)
    yield from _schedule_lines(config)
    yield f"actors: {config.actors} on this machine under `capo run`, any number attached later"


def _model_lines(config: RunConfig) -> Iterator[str]:
    tiny = config.model.tiny
    shape = read_shape(Path(config.model.path)) if tiny is None else tiny_shape(tiny)
    if shape is None:
        yield f"model: {config.model.path} is not on this machine; its size is unknown here"
        return
    element = _BYTES[config.model.dtype]
    parameters, engine_bytes = shape.num_parameters, shape.num_parameters * element
    kv_bytes_per_token = shape.kv_values_per_token * element
    models = 1 + needs_critic(config.algorithm)
    frozen = 1 if needs_reference(config.algorithm) else 0
    memory = parameters * _learner_bytes(config, models, frozen)
    ranks = config.learner.ranks
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    yield (
        f"model: {_count(parameters)} parameters in {config.model.dtype}; learner memory "
        f"{_size(memory)}{each} for {models} trained and {frozen} frozen model(s), without "
        "activations"
    )
    length, episodes = config.model.max_length, config.rollout.concurrency
    yield (
        f"engine: {_size(engine_bytes)} weights, {_size(kv_bytes_per_token)} of KV "
        f"cache a token, {_size(kv_bytes_per_token * length * episodes)} if all {episodes} "
        f"episodes grew to {length} tokens"
    )
    yield f"weight sync: {_size(engine_bytes)} to every actor after every update"


def _update_lines(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    steps = learner.minibatches * learner.epochs
    yield (
        f"update: {learner.batch_episodes} episodes, {steps} optimizer step(s) of "
        f"{learner.batch_episodes // learner.minibatches} episodes, microbatches of at most "
        f"{learner.token_budget} tokens"
    )
    if steps == 1 and config.algorithm.ratio != "behaviour":
        yield (
            "ratio: the only step of an update starts from the proximal policy, so every ratio is "
            "1 and clipping does nothing; more minibatches or epochs give it something to do"
        )
    yield f"episodes: {config.updates * learner.batch_episodes} in {config.updates} updates"


def _schedule_lines(config: RunConfig) -> Iterator[str]:
    learner, scheduler = config.learner, config.scheduler
    if scheduler.max_staleness == 0:
        yield "schedule: synchronous; rollout and update alternate"
    else:
        in_flight = (scheduler.max_staleness + 1) * learner.batch_episodes
        yield (
            f"schedule: rollout and update overlap; an action is at most {scheduler.max_staleness} "
            f"version(s) old when trained, at most {in_flight} episodes are ahead of the learner"
        )
    if scheduler.max_flat_batches:
        groups = scheduler.max_flat_batches * learner.batch_episodes // scheduler.group_size
        yield (
            f"groups of {scheduler.group_size}: one whose returns are all the same is replaced, up "
            f"to {groups} before an update takes them as they are"
        )


def _learner_bytes(config: RunConfig, trained: int, frozen: int) -> float:
    """Per parameter of one model, on one rank: ZeRO's stages share out more and more of it."""
    ranks, stage = config.learner.ranks, config.learner.zero_stage
    moments = _MOMENT_BYTES / (ranks if stage >= 1 else 1)
    gradients = _GRADIENT_BYTES / (ranks if stage >= 2 else 1)
    weights = _WEIGHT_BYTES / (ranks if stage == 3 else 1)
    return trained * (moments + gradients + weights) + frozen * weights


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _size(number: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"
