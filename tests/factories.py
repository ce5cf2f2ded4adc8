"""The smallest valid records, models and configurations that tests build on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from capo.configs.algorithms import AlgorithmConfig
from capo.configs.schema import EnvironmentConfig, LearnerConfig, ModelConfig, RunConfig
from capo.learner.episodes import Episode, prompts
from capo.protocol.records import EpisodeEnd, EpisodeStatus, Step, VersionSpan

VOCABULARY = 23


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def step(
    index: int = 0,
    *,
    episode_id: str = "lease-0.0",
    keep: int = 0,
    observation: Sequence[int] = (1, 2, 3),
    action: Sequence[int] = (4, 5),
    logprob: float = -3.0,
    version: int = 0,
    reward: float = 0.0,
    **others: Any,
) -> Step:
    return Step(
        episode_id=episode_id,
        index=index,
        keep=keep,
        observation=np.array(observation, dtype=np.int32),
        action=np.array(action, dtype=np.int32),
        behaviour_logprobs=np.full(len(action), logprob, dtype=np.float32),
        versions=(VersionSpan(version, len(action)),),
        reward=reward,
        **others,
    )


def episode(
    steps: Sequence[Step] = (),
    *,
    episode_id: str = "lease-0.0",
    group_id: str = "group-0",
    member: int = 0,
    status: EpisodeStatus = EpisodeStatus.TERMINATED,
    outcome: float = 0.0,
    final_keep: int = 0,
    final_observation: Sequence[int] | None = None,
) -> Episode:
    """`steps` as given, under this episode's id; one step if none are given."""
    own = tuple(
        msgspec.structs.replace(one, episode_id=episode_id, index=index)
        for index, one in enumerate(steps or (step(),))
    )
    return Episode(
        episode_id=episode_id,
        task_id="task-0",
        group_id=group_id,
        member=member,
        steps=own,
        end=EpisodeEnd(
            episode_id=episode_id,
            status=status,
            num_steps=len(own),
            outcome=outcome,
            final_keep=final_keep,
            final_observation=(
                None if final_observation is None else np.array(final_observation, dtype=np.int32)
            ),
        ),
    )


def random_episode(
    seed: int,
    *,
    num_steps: int = 4,
    rebuilt: float = 0.3,
    vocabulary: int = VOCABULARY,
    max_tokens: int = 6,
    **others: Any,
) -> Episode:
    """A played-looking episode; with probability `rebuilt` a prompt keeps only part of what was."""
    rng = np.random.default_rng(seed)
    steps: list[Step] = []
    length = 0
    for index in range(num_steps):
        keep = int(rng.integers(0, length)) if length and rng.random() < rebuilt else length
        observation = rng.integers(0, vocabulary, rng.integers(1, max_tokens + 1))
        action = rng.integers(0, vocabulary, rng.integers(1, max_tokens + 1))
        steps.append(
            step(
                index,
                keep=keep,
                observation=observation,
                action=action,
                logprob=-float(np.log(vocabulary)) - 0.1 * rng.random(),
                reward=float(rng.normal()) if index == num_steps - 1 else 0.0,
            )
        )
        length = keep + len(observation) + len(action)
    if others.get("status") is EpisodeStatus.TRUNCATED:
        others.setdefault("final_keep", length)
        others.setdefault("final_observation", rng.integers(0, vocabulary, 3))
    name = f"lease-{seed}.0"
    return episode(steps, **{"episode_id": name, "group_id": f"group-{seed}", **others})


def batch_of_episodes(count: int, *, seed: int = 0, **others: Any) -> list[Episode]:
    """Episodes of different lengths; every third one was truncated."""
    return [
        random_episode(
            seed * 1000 + number,
            num_steps=1 + number % 4,
            status=EpisodeStatus.TRUNCATED if number % 3 == 2 else EpisodeStatus.TERMINATED,
            **others,
        )
        for number in range(count)
    ]


def cut_apart(played: Episode) -> Episode:
    """The same prompts and actions, but every prompt is sent whole and so starts a segment."""
    whole = list(prompts(played))
    steps = tuple(
        msgspec.structs.replace(one, keep=0, observation=prompt)
        for one, prompt in zip(played.steps, whole, strict=False)
    )
    end = played.end
    if end.final_observation is not None:
        end = msgspec.structs.replace(end, final_keep=0, final_observation=whole[-1])
    return msgspec.structs.replace(played, steps=steps, end=end)


def run_config(
    *,
    algorithm: AlgorithmConfig | None = None,
    dtype: str = "float32",
    seed: int = 0,
    updates: int = 10,
    **learner: Any,
) -> RunConfig:
    """A run of tiny updates; keywords are the learner's."""
    settings = {
        "batch_episodes": 6,
        "minibatches": 2,
        "token_budget": 512,
        "policy_lr": 1e-2,
        "critic_lr": 1e-2,
        **learner,
    }
    return RunConfig(
        name="test",
        seed=seed,
        updates=updates,
        environment=EnvironmentConfig(factory="tests:none"),
        model=msgspec.convert({"path": "policy", "dtype": dtype, "max_length": 512}, ModelConfig),
        algorithm=algorithm or AlgorithmConfig(),
        learner=msgspec.convert(settings, LearnerConfig),
    )


def tiny_policy(
    folder: Path, *, seed: int = 0, vocabulary: int = VOCABULARY, tied: bool = True, layers: int = 2
) -> Path:
    """Writes a random Qwen3 (grouped-query attention, hidden size 16) to `folder`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return folder
