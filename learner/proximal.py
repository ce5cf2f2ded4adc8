"""The proximal policy's log-probs without a pass of their own (A-3PO, arXiv 2512.06547).

N tokens. An approximation for runs that cannot afford the pass; the default learner recomputes.
"""

import torch
from torch import Tensor


def approximate_proximal(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    versions: Tensor,
    current_version: int,
    method: str,
) -> Tensor:
    """Interpolate between behaviour and current policy by version -> [N], detached.

    The proximal policy is taken to be version current - 1, so a token sampled under version v lies
    a = (current - 1 - v) / (current - v) of the way. "loglinear" mixes log-probs, "linear"
    probabilities, "rollout" takes the behaviour policy as it is. Tokens with a negative version
    were not sampled and are not moved.

    Args: logprobs, behaviour_logprobs, versions [N].
    """
    current, behaviour = logprobs.detach(), behaviour_logprobs.detach()
    if not current.shape == behaviour.shape == versions.shape:
        raise ValueError(
            f"Shapes {tuple(current.shape)}, {tuple(behaviour.shape)} and"
            f" {tuple(versions.shape)} must all be [N]."
        )
    if method == "rollout":
        return behaviour.clone()
    behind = current_version - versions.to(current)
    way = torch.where((behind > 0) & (versions >= 0), (behind - 1.0) / behind, 0.0).clamp(0.0, 1.0)
    if method == "loglinear":
        return behaviour + way * (current - behaviour)
    if method == "linear":
        return ((1.0 - way) * behaviour.exp() + way * current.exp() + 1e-10).log()
    raise ValueError(f"Unknown method {method!r}; known are loglinear, linear, rollout.")
