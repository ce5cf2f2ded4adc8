"""What a configuration may not say: every rule is one sentence with the numbers and a remedy."""

import math
import re
from collections.abc import Iterator

import msgspec

from capo.configs.algorithms import compares_returns, needs_groups
from capo.configs.schema import RunConfig

_POSITIVE = """
    learner.batch_episodes learner.minibatches learner.epochs learner.token_budget
    learner.policy_lr learner.critic_lr learner.ranks
    rollout.temperature rollout.max_action_tokens rollout.concurrency rollout.env_timeout_s
    rollout.engine_timeout_s rollout.kv_cache_gib rollout.tensor_parallel_size
    scheduler.group_size scheduler.max_attempts scheduler.error_window
    weight_sync.bucket_mib weight_sync.join_timeout_s weight_sync.transfer_timeout_s
    checkpoint.every checkpoint.keep_last network.heartbeat_s network.dead_after_s
    network.window network.max_message_mib model.max_length
"""
_NOT_NEGATIVE = """
    updates seed actors learner.policy_warmup_steps learner.policy_final_lr_factor
    learner.weight_decay learner.max_grad_norm scheduler.max_staleness
    evaluation.games evaluation.every weight_sync.probe_tolerance
"""
_FRACTION = "scheduler.max_error_fraction rollout.gpu_memory_utilization"

HOTTEST = 2.0  # temperature, of vLLM


def problems(config: RunConfig) -> list[str]:
    """What is wrong with `config`, in order of the rules; empty when it can run. How values go
    together is asked only of possible values: one may be a divisor."""
    return list(_ranges(config)) or [
        *_world_and_model(config),
        *_batches(config),
        *_network(config),
    ]


def _value(config: RunConfig, name: str) -> float:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, int | float)
    return value


def _is_loopback(address: str) -> bool:
    host = address.rpartition("://")[2].rpartition(":")[0] or address
    return host in ("localhost", "[::1]", "::1") or host.startswith("127.")


def _ranges(config: RunConfig) -> Iterator[str]:
    for name in _POSITIVE.split():
        if not (_value(config, name) > 0 and math.isfinite(_value(config, name))):
            yield f"{name} must be positive, got {_value(config, name)}."
    for name in _NOT_NEGATIVE.split():
        if not (_value(config, name) >= 0 and math.isfinite(_value(config, name))):
            yield f"{name} must not be negative, got {_value(config, name)}."
    for name in _FRACTION.split():
        if not 0 < _value(config, name) <= 1:
            yield f"{name} must be in (0, 1], got {_value(config, name)}."
    if config.warm_start is not None:
        for field in msgspec.structs.fields(config.warm_start):
            value = getattr(config.warm_start, field.name)
            if value < 0 or (value == 0 and field.name != "warmup_steps"):
                yield f"warm_start.{field.name} must be positive, got {value}."


def _world_and_model(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not config.name or "/" in config.name:
        yield f"name must be a plain word, got {config.name!r}."
    if ":" not in config.environment.factory:
        yield f"environment.factory must be 'module:name', got {config.environment.factory!r}."
    if bool(model.path) == (model.tiny is not None):
        yield (
            "exactly one of model.path and [model.tiny] must be given: a Hugging Face folder, "
            "or a small model built from scratch."
        )
    if model.tiny is not None:
        for name, value in msgspec.structs.asdict(model.tiny).items():
            if value < 1:
                yield f"model.tiny.{name} must be positive, got {value}."
                return
        if model.tiny.num_heads % model.tiny.num_kv_heads:
            yield (
                f"model.tiny.num_heads {model.tiny.num_heads} is no multiple of num_kv_heads "
                f"{model.tiny.num_kv_heads}."
            )
    if config.warm_start is not None and model.tiny is None:
        yield "[warm_start] needs [model.tiny]; a model from model.path is trained as it is."


def _batches(config: RunConfig) -> Iterator[str]:
    model, learner, rollout = config.model, config.learner, config.rollout
    if learner.batch_episodes % learner.minibatches:
        yield (
            f"learner.batch_episodes {learner.batch_episodes} does not divide into "
            f"{learner.minibatches} minibatches; choose a multiple."
        )
    if learner.batch_episodes % config.scheduler.group_size:
        yield (
            f"learner.batch_episodes {learner.batch_episodes} does not divide into groups of "
            f"{config.scheduler.group_size} (scheduler.group_size); choose a multiple."
        )
    if needs_groups(config.algorithm) and config.scheduler.group_size < 2:
        yield (
            f"algorithm {config.algorithm.preset} compares the episodes of a group, but "
            f"scheduler.group_size is {config.scheduler.group_size}; use at least 2."
        )
    if config.scheduler.max_flat_batches > 0 and not compares_returns(config.algorithm):
        yield (
            f"scheduler.max_flat_batches {config.scheduler.max_flat_batches} replaces groups of "
            f"equal returns, which say something under credit {config.algorithm.credit!r}; set it "
            "to 0."
        )
    if config.scheduler.max_flat_batches < 0:
        yield (
            "scheduler.max_flat_batches must not be negative (but -1 = by the method), got "
            f"{config.scheduler.max_flat_batches}."
        )
    if learner.token_budget < model.max_length:
        yield (
            f"learner.token_budget {learner.token_budget} is below the longest possible segment, "
            f"model.max_length {model.max_length}; raise the budget or shorten the model."
        )
    if not config.evaluation.modes and config.evaluation.games:
        yield "evaluation.modes is empty; name sampled or greedy, or set evaluation.games = 0."
    if rollout.max_action_tokens >= model.max_length:
        yield (
            f"rollout.max_action_tokens {rollout.max_action_tokens} leaves no room for a prompt in "
            f"model.max_length {model.max_length}."
        )
    if rollout.temperature > HOTTEST:
        yield f"rollout.temperature {rollout.temperature} is above {HOTTEST:g}, vLLM's highest."


def _network(config: RunConfig) -> Iterator[str]:
    if config.network.dead_after_s <= 2 * config.network.heartbeat_s:
        yield (
            f"network.dead_after_s {config.network.dead_after_s} must exceed two heartbeats of "
            f"{config.network.heartbeat_s} s, or a living peer is taken for dead."
        )
    if not re.fullmatch(
        r"tcp://[^:/]+:\d{1,5}|tcp://\[[0-9a-fA-F:]+\]:\d{1,5}", config.network.bind
    ) or (int(config.network.bind.rpartition(":")[2]) > 65535):
        yield (
            f"network.bind must be tcp://HOST:PORT with a port up to 65535 (0 = any free one), got "
            f"{config.network.bind!r}."
        )
    if not _is_loopback(config.network.bind) and _is_loopback(config.network.weights_host):
        yield (
            f"network.bind {config.network.bind} serves other machines, but network.weights_host "
            f"{config.network.weights_host} is only this one; set it to an address of this machine "
            "that actors can reach."
        )
