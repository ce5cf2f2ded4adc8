"""Estimators of KL(pi || pi_ref) per token, from samples of pi.

N tokens; r = pi_ref / pi. Sources: Schulman, "Approximating KL divergence"; k3 with the limits that
are usual in practice.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Per token, with gradient to `logprobs`; both [N].

    k1 = -log r, abs = |k1|, k2 = (log r)^2 / 2, k3 = r - 1 - log r; "k1+" and "k3+" have their
    value and k2's gradient, which is the unbiased one for the expected KL. k3's is that of the
    reverse KL, k1's is zero in expectation.
    """
    if logprobs.shape != reference_logprobs.shape:
        raise ValueError(
            f"Log-probs of shape {tuple(logprobs.shape)} against reference log-probs of shape"
            f" {tuple(reference_logprobs.shape)}."
        )
    reference = reference_logprobs.detach()
    if estimator.endswith("+"):
        value = kl_estimate(logprobs.detach(), reference, estimator[:-1])
        gradient = kl_estimate(logprobs, reference, "k2")
        return gradient - gradient.detach() + value
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        log_r = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return (log_r.exp() - log_r - 1.0).clamp(-K3_LIMIT, K3_LIMIT)
    raise ValueError(f"Unknown KL estimator {estimator!r}; known are k1, abs, k2, k3, k1+, k3+.")


def mismatch(behaviour_logprobs: Tensor, proximal_logprobs: Tensor, estimator: str) -> Tensor:
    """KL(behaviour || proximal) per token of samples from the behaviour policy -> [N], detached."""
    with torch.no_grad():
        return kl_estimate(behaviour_logprobs, proximal_logprobs, estimator)
