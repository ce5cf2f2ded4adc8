"""What an inference engine is to a rollout: token ids in, token ids and log-probs out.

P prompt tokens, L action tokens. The engine of production is `vllm_engine`; tests script their own.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from capo.protocol.errors import WeightSyncError
from capo.protocol.messages import GroupForm, UpdateWeights, WeightsReport
from capo.protocol.records import FloatArray, IntArray, VersionSpan


class UnreachableStoreError(WeightSyncError):
    """The learner's store cannot be reached from this machine: no other member is to blame."""


class Sample(Struct, frozen=True, kw_only=True):
    """One action. `stopped`: it ended with a stop token, which is its last token."""

    tokens: IntArray  # int32 [L], L >= 1
    logprobs: FloatArray  # float32 [L], at the sampling temperature
    versions: tuple[VersionSpan, ...]  # covers the L tokens in order
    stopped: bool
    entropies: FloatArray | None = None  # float32 [L], if the engine can tell


class Engine(Protocol):
    """Every method may be called while others run; weights change in the middle of an action."""

    @property
    def version(self) -> int:
        """The policy version that samples now; -1 before the first broadcast."""
        ...

    @property
    def broken(self) -> str:
        """Why this engine may no longer sample, "" while it may."""
        ...

    @property
    def workers(self) -> int:
        """How many ranks this engine takes in a weight group."""
        ...

    async def generate(
        self,
        prompt: IntArray,
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        """Sample one action; temperature 0 is greedy, its log-probs those at temperature 1.

        Raises EngineError when the engine is broken or gives no action. That the numbers of a
        Sample are finite and cover its tokens is checked where it is used.
        """
        ...

    async def overdue(self, begun_at: float) -> None:
        """Tell that an action begun at `begun_at`, by time.monotonic(), did not come in time.

        An engine that has answered nothing since then hangs, and is broken from now on.
        """
        ...

    async def form_group(self, form: GroupForm) -> None:
        """Join the weight group of an epoch in place of any earlier one; WeightSyncError if not."""
        ...

    async def update_weights(self, update: UpdateWeights) -> WeightsReport:
        """Receive one broadcast, check it, sample with it. Errors are in the report, not raised."""
        ...

    async def close(self) -> None: ...
