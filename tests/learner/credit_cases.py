"""What tests of credit share: ragged episodes with everything that any credit may read."""

from typing import Any

import torch
from torch import Tensor

from capo.configs.algorithms import critic_reads
from capo.learner.credit import Experience


class Batch:
    """Episodes with random rewards, lengths, values and states; groups in blocks."""

    def __init__(
        self, actions_per_episode: list[int], seed: int, group_size: int = 2, ends: float = 0.5
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def noise(size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        self.counts = actions_per_episode
        num_actions = sum(actions_per_episode)
        self.lengths = torch.randint(1, 5, (num_actions,), generator=generator).tolist()
        self.rewards = noise(num_actions)
        self.boundary_values = noise(num_actions)
        self.token_values = noise(sum(self.lengths))
        self.bootstrap = noise(len(actions_per_episode))
        self.terminated = torch.rand(len(actions_per_episode), generator=generator) < ends
        self.log_weights = 0.3 * noise(num_actions)
        self.groups = torch.arange(len(actions_per_episode)) // group_size
        states = torch.randint(0, 3, (num_actions,), generator=generator)
        self.state_keys = [f"s{one}" for one in states.tolist()]

    def experience(self, algorithm: Any, **changes: Any) -> Experience:
        reads = critic_reads(algorithm)
        values = {"boundary": self.boundary_values, "token": self.token_values, "none": None}
        held: dict[str, Any] = {
            "rewards": self.rewards,
            "episode_of_action": torch.arange(len(self.counts)).repeat_interleave(
                torch.tensor(self.counts)
            ),
            "action_of_token": torch.arange(len(self.lengths)).repeat_interleave(
                torch.tensor(self.lengths)
            ),
            "terminated": self.terminated,
            "group_of_episode": self.groups,
            "state_keys": self.state_keys,
            "values": values[reads],
            "bootstrap_values": self.bootstrap,
            "log_weights": self.log_weights,
        }
        return Experience(**{**held, **changes})

    def by_episode(self, values: Tensor) -> list[list[float]]:
        return [part.tolist() for part in values.split(self.counts)]

    def tails(self) -> list[float]:
        return torch.where(self.terminated, 0.0, self.bootstrap).tolist()
