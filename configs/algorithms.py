"""The algorithm's table: which part is composed with which. Presets are compositions, not classes.

Formulas, sources and defaults of every part: docs/algorithms.md.
"""

from typing import Literal

from msgspec import Struct


class AlgorithmConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """CAPO (arXiv 2604.18401) by default."""

    preset: str = "capo"
    credit: Literal["action_gae"] = "action_gae"
    gamma: float = 0.99
    lam: float = 1.0
    bootstrap_truncated: bool = True
    ratio: Literal["calibrated"] = "calibrated"
    alpha: float = 0.5
    centre: bool = True
    clip_low: float = 1e-3
    clip_high: float = 1e-3
    kl_coefficient: float = 1e-3
    behaviour_weight: Literal["geo", "prod", "sqrt", "none"] = "geo"
    behaviour_cap: float = 2.0
    value_clip: float | None = None


def needs_groups(algorithm: AlgorithmConfig) -> bool:
    return False


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    return True


def critic_reads(algorithm: AlgorithmConfig) -> Literal["boundary", "token", "none"]:
    return "boundary"


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    return algorithm.kl_coefficient > 0


def needs_entropy(algorithm: AlgorithmConfig) -> bool:
    return False


def needs_state_keys(algorithm: AlgorithmConfig) -> bool:
    return False


def needs_logprob_statistics(algorithm: AlgorithmConfig) -> bool:
    return algorithm.centre
