"""Log importance ratios of the current policy to an older one, per token or per action.

N tokens, K actions. All in logs; nothing is exponentiated here. Knows no advantages.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from capo.learner.ragged import action_means, action_sums, check_rows, check_tokens

LOG_RATIO_LIMIT = 20.0  # e^20 = 4.9e8; beyond it a ratio says only "broken"
SEQUENCE_LOG_RATIO_LIMIT = 10.0


class TokenLogRatios(NamedTuple):
    values: Tensor  # [N], within the limit
    clamped: Tensor  # bool [N], met the limit, so without gradient


def token_log_ratios(
    logprobs: Tensor, old_logprobs: Tensor, limit: float = LOG_RATIO_LIMIT
) -> TokenLogRatios:
    """z_i = log pi - log pi_old (arXiv 2604.18401 eq. 3), clamped to +-limit.

    Args: logprobs [N] with gradient, old_logprobs [N].
    """
    if logprobs.shape != old_logprobs.shape or logprobs.ndim != 1:
        raise ValueError(
            f"Log-probs of shape {tuple(logprobs.shape)} against {tuple(old_logprobs.shape)};"
            " both must be [N]."
        )
    raw = logprobs - old_logprobs.detach()
    return TokenLogRatios(raw.clamp(-limit, limit), raw.detach().abs() > limit)


def calibrated_log_ratio(
    z: Tensor, action_of_token: Tensor, lengths: Tensor, alpha: float, mu: Tensor
) -> Tensor:
    """log w_k = mu + sum_{i in k} (z_i - mu) / L_k^alpha (arXiv 2604.18401 eq. 4).

    alpha 0 is the product of token ratios, 1 their geometric mean, 1/2 CAPO. With mu = 0 nothing
    is centred. mu enters as a constant: no gradient flows through it.

    Args:
        z: [N] token log-ratios; 0 for tokens that are masked out.
        action_of_token: int64 [N].
        lengths: [K] unmasked tokens per action.
        mu: scalar, the token-weighted mean of z over the minibatch.

    Returns: [K]; 0 for an action without tokens.
    """
    check_tokens(action_of_token, z)
    check_rows(lengths.shape[0], "actions", lengths)
    mu = mu.detach().to(z)
    sums = action_sums(z, action_of_token, lengths.shape[0])
    log_ratio = mu + (sums - lengths * mu) / lengths.clamp(min=1) ** alpha
    return torch.where(lengths > 0, log_ratio, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(
    z: Tensor, action_of_token: Tensor, num_actions: int, kept: Tensor | None = None
) -> Tensor:
    """GSPO's ratio seen from a token: sg(mean of z over the action) + z_i - sg(z_i)
    (arXiv 2507.18071 eq. 13). The value is the action's geometric mean, the gradient the token's.

    Args: z [N]; kept bool [N], tokens that enter the mean (all by default).

    Returns: [N], at most `SEQUENCE_LOG_RATIO_LIMIT`.
    """
    check_tokens(action_of_token, z)
    constant = z.detach()
    if kept is None:
        means = action_means(constant, action_of_token, num_actions)
    else:
        lengths = action_sums(kept.to(z), action_of_token, num_actions)
        sums = action_sums(constant * kept, action_of_token, num_actions)
        means = sums / lengths.clamp(min=1)
    per_token = means[action_of_token] + (z - constant)
    return per_token.clamp(max=SEQUENCE_LOG_RATIO_LIMIT)


def geometric_log_ratio(
    z: Tensor,
    advantages: Tensor,
    action_of_token: Tensor,
    lengths: Tensor,
    clip_low: float,
    clip_high: float,
    epsilon: float = 0.0,
) -> Tensor:
    """GMPO: tokens are clipped in the log domain, pessimistically for their advantage's sign, then
    averaged (arXiv 2507.20673 eq. 4).

    Args: z, advantages [N]; lengths [K]; epsilon added to lengths (1e-8 in the released code).

    Returns: [K].
    """
    check_tokens(action_of_token, z, advantages)
    sign = advantages.sign()
    pessimistic = sign * torch.minimum(sign * z, sign * z.clamp(-clip_low, clip_high))
    sums = action_sums(pessimistic, action_of_token, lengths.shape[0])
    return sums / (lengths.clamp(min=1) + epsilon)
