"""One episode: the environment speaks, the policy answers, every transition is told at once.

What goes wrong outside the policy (the environment raises, hangs or returns nonsense; the engine
dies) ends the episode with its own status. It is never a reward of 0.
"""

import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import numpy as np

from capo.actors.chat import Chat, Dialogue, Prompt
from capo.actors.engine import Engine, Sample
from capo.actors.env_answers import checked_observation, checked_transition
from capo.actors.foreign import sentence
from capo.actors.guards import env_call, next_prompt, trainable_sample
from capo.configs.schema import RolloutConfig
from capo.envs.api import Env, Observation, Transition
from capo.protocol.errors import EngineError, EnvError
from capo.protocol.records import EpisodeEnd, EpisodeStatus, Lease, Purpose, Step

T = TypeVar("T")


async def play(
    lease: Lease, env: Env, chat: Chat, engine: Engine, config: RolloutConfig
) -> AsyncGenerator[Step | EpisodeEnd, None]:
    """Yields every Step as soon as its reward is known, and exactly one EpisodeEnd at last.

    Raises nothing but CancelledError; the environment stays open, its owner closes it.
    """
    episode = _Episode(lease, env, chat, engine, config)
    try:
        observation = await episode.reset()
        prompt = episode.read_first(observation)
        while True:
            sample = await episode.sample(prompt)
            transition = await episode.step(sample)
            yield Step(
                episode_id=lease.episode_id,
                index=episode.num_steps,
                keep=prompt.keep,
                observation=prompt.observation,
                action=sample.tokens,
                behaviour_logprobs=sample.logprobs,
                versions=sample.versions,
                reward=transition.reward,
                entropies=sample.entropies,
                state_key=observation.state_key,
                info=transition.info,
            )
            episode.num_steps += 1
            observation = checked_observation(transition.observation)
            if transition.terminated:
                yield episode.end(EpisodeStatus.TERMINATED)
                return
            prompt = episode.read(observation)
            if transition.truncated or episode.overlong:
                yield episode.end(EpisodeStatus.TRUNCATED, final=_cut(prompt, chat.max_length))
                return
    except EnvError as error:
        yield episode.end(EpisodeStatus.ENV_ERROR, error)
    except EngineError as error:
        yield episode.end(EpisodeStatus.ENGINE_ERROR, error)


def action_seed(lease_seed: int, index: int) -> int:
    """The seed of one action: 62 bits that depend on the lease's seed and the step alone."""
    digest = hashlib.blake2b(f"action/{lease_seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class _Episode:
    """One episode under way: asks environment and engine in turn, and counts what it comes to."""

    def __init__(
        self, lease: Lease, env: Env, chat: Chat, engine: Engine, config: RolloutConfig
    ) -> None:
        self.num_steps = 0  # whose records were yielded
        self.overlong = False  # the prompt that was read last leaves no room for an action
        self._lease = lease
        self._env = env
        self._chat = chat
        self._engine = engine
        self._config = config
        self._dialogue = Dialogue(chat, config.on_overlong, config.max_action_tokens)
        self._outcome = 0.0
        self._tokens = 0
        self._cut = 0  # actions that ended for length
        self._malformed = 0
        self._dropped_messages = 0
        self._engine_s = 0.0
        self._env_s = 0.0

    async def reset(self) -> Observation:
        lease = self._lease
        answer = await self._ask_env("reset", lambda: self._env.reset(lease.task, lease.seed))
        return checked_observation(answer)

    def read_first(self, observation: Observation) -> Prompt:
        """As `read`; raises EnvError when the prompt leaves no room for an action."""
        prompt = self.read(observation)
        if self.overlong:
            raise EnvError(
                f"the first prompt has {len(prompt.tokens)} tokens and leaves no room for an "
                f"action in model.max_length {self._chat.max_length}; raise it or shorten the "
                "observation"
            )
        return prompt

    def read(self, observation: Observation) -> Prompt:
        prompt = next_prompt(self._dialogue, observation)
        self._dropped_messages += prompt.dropped_messages
        self.overlong = self._dialogue.room() < 1
        return prompt

    async def sample(self, prompt: Prompt) -> Sample:
        lease, config = self._lease, self._config
        greedy = lease.purpose is Purpose.EVAL_GREEDY
        started = time.monotonic()
        sampling = self._engine.generate(
            prompt.tokens,
            max_tokens=self._dialogue.room(),
            temperature=0.0 if greedy else config.temperature,
            seed=action_seed(lease.seed, self.num_steps),
            stop_token_ids=self._chat.stop_token_ids,
        )
        sample = await trainable_sample(self._engine, sampling, config.engine_timeout_s)
        self._engine_s += time.monotonic() - started
        self._tokens += len(sample.tokens)
        self._cut += not sample.stopped
        return sample

    async def step(self, sample: Sample) -> Transition:
        """What the environment answers; its observation is not checked yet."""
        action = self._dialogue.act(sample.tokens)
        self._malformed += action.malformed != ""
        answer = await self._ask_env("step", lambda: self._env.step(action))
        transition = checked_transition(answer)
        self._outcome = transition.outcome
        return transition

    async def _ask_env(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """`call` also looks the method up, so that what this raises is caught too."""
        started = time.monotonic()
        try:
            return await env_call(name, call, self._config.env_timeout_s)
        finally:
            self._env_s += time.monotonic() - started

    def end(
        self, status: EpisodeStatus, error: Exception | None = None, final: Prompt | None = None
    ) -> EpisodeEnd:
        """`final` is the prompt that the policy would have read next."""
        return EpisodeEnd(
            episode_id=self._lease.episode_id,
            status=status,
            num_steps=self.num_steps,
            outcome=self._outcome if error is None else 0.0,
            final_keep=0 if final is None else final.keep,
            final_observation=None if final is None else np.ascontiguousarray(final.observation),
            metrics={
                "action_tokens": float(self._tokens),
                "actions_cut": float(self._cut),
                "malformed_calls": float(self._malformed),
                "dropped_messages": float(self._dropped_messages),
                "overlong": float(self.overlong),
                "engine_s": self._engine_s,
                "env_s": self._env_s,
            },
            error="" if error is None else sentence(error),
        )


def _cut(prompt: Prompt, max_length: int) -> Prompt:
    """The prompt as far as the model can read it."""
    tokens = prompt.tokens[:max_length]
    return Prompt(tokens=tokens, keep=min(prompt.keep, len(tokens)))
