"""What a run will need, from its configuration alone: parameters, memory, tokens, versions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capo.configs.algorithms import needs_critic, needs_reference
from capo.configs.schema import RunConfig, TinyModelConfig
from capo.protocol.errors import ConfigError

_BYTES = {"float32": 4, "bfloat16": 2}
_WEIGHT_BYTES, _GRADIENT_BYTES, _MOMENT_BYTES = 4, 4, 8  # of a learner, in float32 whatever dtype
_TINY_VOCABULARY = 350  # bytes, and a small world's words with and without a space, about


def plan_lines(config: RunConfig) -> Iterator[str]:
    """Sentences for `capo check`, one per thing that a run needs or promises."""
    yield from _model_lines(config)
    yield from _update_lines(config)
    yield from _schedule_lines(config)
    yield f"actors: {config.actors} on this machine under `capo run`, any number attached later"


def _model_lines(config: RunConfig) -> Iterator[str]:
    shape = _model_shape(config)
    if shape is None:
        yield f"model: {config.model.path} is not on this machine; its size is unknown here"
        return
    parameters, kv_bytes_per_token = shape
    engine_bytes = parameters * _BYTES[config.model.dtype]
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


def _model_shape(config: RunConfig) -> tuple[int, int] | None:
    """(parameters, KV cache bytes per token), or None when the model is not on this machine."""
    element = _BYTES[config.model.dtype]
    if config.model.tiny is not None:
        tiny = config.model.tiny
        kv = 2 * tiny.num_layers * tiny.num_kv_heads * tiny.head_dim * element
        return _decoder_parameters(_tiny_as_json(tiny)), kv
    file = Path(config.model.path) / "config.json"
    if not file.is_file():
        return None
    try:
        shape = json.loads(file.read_text(encoding="utf-8"))
        heads = shape["num_attention_heads"]
        shape.setdefault("head_dim", shape["hidden_size"] // heads)
        shape.setdefault("num_key_value_heads", heads)
        kv = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        return _decoder_parameters(shape), kv * element
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} is not a decoder's config.json: {error!r}.") from error


def _tiny_as_json(tiny: TinyModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": tiny.hidden_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "head_dim": tiny.head_dim,
        "intermediate_size": tiny.intermediate_size,
        "vocab_size": _TINY_VOCABULARY,
        "tie_word_embeddings": False,
    }


def _decoder_parameters(shape: dict[str, Any]) -> int:
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    queries = shape["num_attention_heads"] * head_dim
    keys = shape["num_key_value_heads"] * head_dim
    attention = hidden * (queries + 2 * keys) + queries * hidden
    layer = attention + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    embeddings = shape["vocab_size"] * hidden * (1 if shape.get("tie_word_embeddings") else 2)
    return int(shape["num_hidden_layers"] * layer + embeddings + hidden)


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
