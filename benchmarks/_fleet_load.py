"""What a simulated fleet sends: episodes of rebuilt prompts, one step of several at a time.

A prompt repeats the beginning of the sequence before it (`kept_tokens`) and is new after that; the
first one of an episode is all new. Contents are random and shared, since only sizes matter.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from capo.protocol.frames import encode, size_of
from capo.protocol.messages import Delivery
from capo.protocol.records import EpisodeEnd, EpisodeStatus, Step, VersionSpan

STEPS_PER_EPISODE = 10
VOCABULARY = 150_000


class Load(Struct, frozen=True, kw_only=True, dict=True):
    prompt_tokens: int = 1500
    kept_tokens: int = 1000
    action_tokens: int = 100
    steps_per_delivery: int = 16

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        random = np.random.default_rng(0)
        return (
            random.integers(0, VOCABULARY, self.prompt_tokens, np.int32),
            random.integers(0, VOCABULARY, self.prompt_tokens - self.kept_tokens, np.int32),
            random.integers(0, VOCABULARY, self.action_tokens, np.int32),
            -random.random(self.action_tokens, np.float32),
        )

    def delivery(self, sequence: int, places: Sequence[tuple[str, int]]) -> Delivery:
        """The steps at `places`, which are (episode id, index), and the ends that follow them."""
        first, rest, action, logprobs = self.arrays
        spans = (VersionSpan(0, self.action_tokens),)
        steps = tuple(
            Step(
                episode_id=episode_id,
                index=index,
                keep=self.kept_tokens if index else 0,
                observation=rest if index else first,
                action=action,
                behaviour_logprobs=logprobs,
                versions=spans,
                reward=0.0,
            )
            for episode_id, index in places
        )
        ends = tuple(
            EpisodeEnd(
                episode_id=episode_id,
                status=EpisodeStatus.TERMINATED,
                num_steps=STEPS_PER_EPISODE,
                outcome=1.0,
            )
            for episode_id, index in places
            if index == STEPS_PER_EPISODE - 1
        )
        return Delivery(sequence=sequence, steps=steps, ends=ends)

    def round(self) -> list[Delivery]:
        """The deliveries in which as many episodes as one delivery holds are played from start to
        end: for transports that know no leases. No two steps share an array, or pickle would send
        it once."""
        deliveries = [
            self.delivery(
                index + 1, [(f"t{n:08d}.1", index) for n in range(self.steps_per_delivery)]
            )
            for index in range(STEPS_PER_EPISODE)
        ]
        return [
            replace(delivery, steps=tuple(_own_arrays(step) for step in delivery.steps))
            for delivery in deliveries
        ]

    def bytes_per_step(self) -> float:
        deliveries = self.round()
        num_steps = sum(len(delivery.steps) for delivery in deliveries)
        return sum(size_of(encode(delivery)) for delivery in deliveries) / num_steps


def _own_arrays(step: Step) -> Step:
    return replace(
        step,
        observation=step.observation.copy(),
        action=step.action.copy(),
        behaviour_logprobs=step.behaviour_logprobs.copy(),
    )
