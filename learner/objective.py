"""The policy's loss as a sum over a microbatch, and the sums over the minibatch that it needs.

N tokens, K actions of the part at hand. Two stages make the gradient independent of how a
minibatch is cut: `minibatch_statistics` of every part are added (and all-reduced over ranks), then
each part's `policy_loss` reads the total and the caller divides by `policy_divisor` once.
"""

from msgspec import Struct
from torch import Tensor

from capo.configs.algorithms import AlgorithmConfig


class PolicyInputs(Struct, frozen=True, kw_only=True, eq=False):
    """Everything the policy's loss needs except the current log-probs: frozen for a batch."""

    action_of_token: Tensor  # int64 [N], 0..K-1
    proximal_logprobs: Tensor  # float [N]
    behaviour_logprobs: Tensor  # float [N]
    reference_logprobs: Tensor | None  # float [N], None without a KL term
    advantages: Tensor  # float [K]
    token_advantages: Tensor  # float [N]
    token_weights: Tensor  # float [N]
    token_kept: Tensor  # bool [N]
    action_weights: Tensor  # float [K]
    action_kept: Tensor  # bool [K]
    counted: Tensor  # bool [K]

    def select(self, actions: Tensor) -> "PolicyInputs":
        """The part of these actions (int64, in this order), renumbered from 0; an action's tokens
        keep their order."""
        raise NotImplementedError


class Statistics(Struct, frozen=True, eq=False):
    """Sums over a minibatch, float64. Parts add; all-reduce `sums` over ranks."""

    sums: Tensor  # float64 [S], see `_FIELDS`

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(self.sums + other.sums)


class PolicyLoss(Struct, frozen=True, kw_only=True, eq=False):
    """`loss_sum` carries the gradient (an empty part gives a zero that does, too). The rest are
    detached, per action; ratio units are actions or tokens, so fractions are sums over `units`."""

    loss_sum: Tensor  # scalar; surrogate + beta * KL
    surrogate_sum: Tensor  # scalar, detached
    kl_sum: Tensor  # scalar, detached, before beta
    log_ratio: Tensor  # float [K], of the action; the token mean for token ratios
    centred_sum: Tensor  # float [K]: sum(z - mu) over kept tokens
    units: Tensor  # float [K]
    out_of_range: Tensor  # float [K], units whose ratio left [1 - clip_low, 1 + clip_high]
    active: Tensor  # float [K], units where clipping removed the gradient
    clamped: Tensor  # float [K], tokens whose log-ratio met the numerical limit


def minibatch_statistics(
    logprobs: Tensor | None, inputs: PolicyInputs, algorithm: AlgorithmConfig
) -> Statistics:
    """Of one part. `logprobs [N]` (detached) may be None where `needs_logprob_statistics` is False,
    and where the policy has not moved yet (z = 0)."""
    raise NotImplementedError


def policy_loss(
    logprobs: Tensor, inputs: PolicyInputs, statistics: Statistics, algorithm: AlgorithmConfig
) -> PolicyLoss:
    """`logprobs [N]` of the current policy with gradient; `statistics` of the whole minibatch."""
    raise NotImplementedError


def policy_divisor(statistics: Statistics, algorithm: AlgorithmConfig) -> float:
    """By what the sum over all parts and ranks of `loss_sum` is divided; at least 1."""
    raise NotImplementedError
