"""The policy a run starts from: a tiny model built from scratch, warm-started by cloning.

What is built depends only on the inputs that `_digest` names, so it is kept in a cache folder
($CAPO_CACHE, or ~/.cache/capo) and built once. A folder appears there complete or not at all.
"""

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from capo.actors.chat import Chat, Dialogue
from capo.configs.schema import RunConfig, TinyModelConfig, WarmStartConfig
from capo.envs.api import Demonstrator, EnvFactory, Observation, Vocabulary
from capo.envs.registry import load_factory
from capo.learner.cloning import clone
from capo.learner.episodes import Episode
from capo.learner.hf_checkpoint import copy_tokenizer
from capo.learner.seeds import derive_seed
from capo.learner.segments import Segment, segment
from capo.learner.tiny_model import build_policy, build_tokenizer
from capo.protocol.errors import ConfigError
from capo.protocol.records import EpisodeEnd, EpisodeStatus, Step

RECIPE = 1  # raise it when the code builds something else from the same inputs
_NUMERICS = ("torch", "transformers", "tokenizers")

Report = Callable[[str], None]


def starting_policy(config: RunConfig, report: Report, cache: Path | None = None) -> Path:
    """The Hugging Face folder of the policy at version 0. `report` gets lines for a person.

    `model.path` is taken as it is; `model.tiny` is built, and cloned if there is a [warm_start].
    """
    if config.model.tiny is None:
        return Path(config.model.path)
    factory = load_factory(config.environment.factory, config.environment.options)
    words = _vocabulary(factory, config.environment.factory)
    cache = cache or cache_folder()
    folder = cache / f"{config.name}-{_digest(config, words)}"
    if folder.is_dir():
        report(f"starting policy: {folder} (from the cache)")
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=cache) as scratch:
        built = _build(config, config.model.tiny, factory, words, Path(scratch), report)
        try:
            built.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same result
                raise
    report(f"starting policy: {folder}")
    return folder


def cache_folder() -> Path:
    return Path(os.environ.get("CAPO_CACHE") or Path.home() / ".cache" / "capo")


def build_initial(config: RunConfig, factory: EnvFactory, folder: Path) -> None:
    """Writes the policy as it is before any cloning: its description is already the final one.

    Raises ConfigError where there is no [model.tiny] to build.
    """
    if config.model.tiny is None:
        raise ConfigError("there is nothing to build: the configuration has no [model.tiny]")
    words = _vocabulary(factory, config.environment.factory)
    _initial(config, config.model.tiny, words, folder)


def demonstrated_segments(
    pairs: Sequence[tuple[Observation, str]], chat: Chat, stop_token: int
) -> tuple[Segment, ...]:
    """One demonstrated episode as the policy would have seen and said it, stop tokens included."""
    dialogue = Dialogue(chat)
    steps = []
    for index, (observation, text) in enumerate(pairs):
        prompt = dialogue.observe(observation)
        action = np.append(chat.encode(text), np.int32(stop_token))
        if len(prompt.tokens) + len(action) > chat.max_length:
            raise ConfigError(
                f"a demonstration has {len(prompt.tokens) + len(action)} tokens, but"
                f" model.max_length is {chat.max_length}; raise it"
            )
        dialogue.act(action)
        steps.append(
            Step(
                episode_id="demonstration",
                index=index,
                keep=prompt.keep,
                observation=prompt.observation,
                action=action,
                behaviour_logprobs=np.zeros(0, dtype=np.float32),  # nobody sampled it
                versions=(),
                reward=0.0,
            )
        )
    end = EpisodeEnd(
        episode_id="demonstration", status=EpisodeStatus.TERMINATED, num_steps=len(steps)
    )
    return segment(
        Episode(
            episode_id="demonstration",
            task_id="",
            group_id="",
            member=0,
            steps=tuple(steps),
            end=end,
        )
    )


def _build(
    config: RunConfig,
    tiny: TinyModelConfig,
    factory: EnvFactory,
    words: Sequence[str],
    scratch: Path,
    report: Report,
) -> Path:
    initial = scratch / "initial"
    tokenizer = _initial(config, tiny, words, initial)
    if config.warm_start is None:
        return initial
    chat = Chat(
        tokenizer,
        max_length=config.model.max_length,
        enable_thinking=config.model.enable_thinking,
    )
    report(f"warm start: {config.warm_start.demonstrations} demonstrations")
    demonstrations = tuple(
        one
        for pairs in _demonstrate(config, config.warm_start, factory)
        for one in demonstrated_segments(pairs, chat, tokenizer.eos_token_id)
    )
    cloned = scratch / "cloned"
    clone(
        initial,
        demonstrations,
        config.warm_start,
        seed=config.seed,
        output=cloned,
        progress=_every(max(1, config.warm_start.steps // 10), config.warm_start.steps, report),
    )
    copy_tokenizer(initial, cloned)
    shutil.rmtree(initial)
    return cloned


def _initial(
    config: RunConfig, tiny: TinyModelConfig, words: Sequence[str], folder: Path
) -> PreTrainedTokenizerBase:
    tokenizer = build_tokenizer(words, folder)
    seed = derive_seed(config.seed, "initial weights")
    build_policy(tiny, tokenizer, max_length=config.model.max_length, seed=seed, folder=folder)
    return tokenizer


def _demonstrate(
    config: RunConfig, warm_start: WarmStartConfig, factory: EnvFactory
) -> Iterator[Sequence[tuple[Observation, str]]]:
    """Scripted episodes of training tasks, in their order, again from the start if they end."""
    if not callable(getattr(factory, "demonstrate", None)):
        raise ConfigError(
            f"[warm_start] needs demonstrations, but {config.environment.factory} has no"
            " demonstrate(); leave [warm_start] out"
        )
    demonstrator: Demonstrator = factory  # type: ignore[assignment]
    tasks = factory.tasks("train")
    if not tasks:
        raise ConfigError("[warm_start] needs training tasks, but this environment has none")
    for index in range(warm_start.demonstrations):
        seed = derive_seed(config.seed, "demonstration", index)
        yield demonstrator.demonstrate(tasks[index % len(tasks)], seed)


def _vocabulary(factory: EnvFactory, name: str) -> Sequence[str]:
    if not callable(getattr(factory, "words", None)):
        raise ConfigError(
            f"[model.tiny] needs an environment that can list its words, and {name} has no"
            " words(); set model.path to a pretrained model instead"
        )
    vocabulary: Vocabulary = factory  # type: ignore[assignment]
    return vocabulary.words()


def _digest(config: RunConfig, words: Sequence[str]) -> str:
    """Names everything that decides the result, the libraries that compute it included."""
    inputs = (
        RECIPE,
        config.seed,
        config.environment,
        config.model.tiny,
        config.model.max_length,
        config.model.enable_thinking,
        config.warm_start,
        tuple(words),
        tuple((name, importlib.metadata.version(name)) for name in _NUMERICS),
    )
    return hashlib.blake2b(msgspec.json.encode(inputs, order="sorted"), digest_size=8).hexdigest()


def _every(interval: int, last: int, report: Report) -> Callable[[int, float], None]:
    def progress(step: int, loss: float) -> None:
        if step % interval == 0 or step == last:
            report(f"warm start: step {step} of {last}, {loss:.2f} nats an action token")

    return progress
