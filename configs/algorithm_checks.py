"""Which algorithms cannot be computed, or make no sense, and the sentence that says so."""

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from capo.configs.algorithms import AlgorithmConfig

TOKEN_RATIOS = ("token", "behaviour")
_GAE = ("gamma", "lam", "bootstrap_truncated")
_TRACE = ("gamma", "trace_rho_cap", "trace_c_cap", "bootstrap_truncated")
CREDIT_READS = {
    "action_gae": _GAE,
    "token_gae": _GAE,
    "brace": (*_TRACE, "trace_steps"),
    "vtrace": (*_TRACE, "lam"),
    "group": ("group_std",),
    "rloo": (),
    "reinforce_pp": ("gamma",),
    "gigpo": ("gamma", "group_std", "group_weighting", "step_weight"),
    "gagpo": ("gamma", "lam"),
    "g2po": ("gamma", "group_std", "step_weight", "success_reward"),
    "hgpo": ("gamma", "group_std", "history_length", "history_power"),
}


def problem(algorithm: "AlgorithmConfig", has_critic: bool) -> str:
    """The first thing that is wrong with it, or ""."""
    return _range_problem(algorithm) or _combination_problem(algorithm, has_critic)


def without_effect(a: "AlgorithmConfig") -> frozenset[str]:
    """The keys that nothing reads as the parts are composed."""
    weighted, rejects = a.behaviour_weight != "none", a.reject != "none"
    read = {
        "alpha": a.ratio == "calibrated",
        "centre": a.ratio == "calibrated",
        "clip_low": a.clipping != "soft_gate",
        "clip_high": a.clipping != "soft_gate",
        "gate_positive": a.clipping == "soft_gate",
        "gate_negative": a.clipping == "soft_gate",
        "length_norm": a.aggregation == "action_sum_norm",
        "kl_estimator": a.kl_coefficient > 0,
        "behaviour_cap": weighted,
        "behaviour_floor": weighted,
        "behaviour_beyond": weighted,
        "behaviour_normalise": weighted,
        "reject_low": rejects and a.reject.endswith("k1"),
        "reject_high": rejects,
    }
    of_credit = {key for keys in CREDIT_READS.values() for key in keys}
    others = frozenset(name for name, is_read in read.items() if not is_read)
    return others | (of_credit - {*CREDIT_READS[a.credit]})


def _range_problem(a: "AlgorithmConfig") -> str:
    for name, value in msgspec.structs.asdict(a).items():
        if isinstance(value, float) and not math.isfinite(value):
            return f"{name} must be a finite number, got {value:g}."
    for name in ("gamma", "lam"):
        value = getattr(a, name)
        if not 0.0 <= value <= 1.0:
            return f"{name} must lie in [0, 1], got {value:g}."
    for name in ("clip_low", "clip_high", "kl_coefficient", "step_weight"):
        value = getattr(a, name)
        if not value >= 0.0:
            return f"{name} must not be negative, got {value:g}."
    for name in (
        "behaviour_cap",
        "trace_rho_cap",
        "trace_c_cap",
        "length_norm",
        "reject_low",
        "gate_positive",
        "gate_negative",
    ):
        value = getattr(a, name)
        if not value > 0.0:
            return f"{name} must be positive, got {value:g}."
    for name in ("veto", "estr_tau", "m2_threshold", "value_clip", "behaviour_floor"):
        value = getattr(a, name)
        if value is not None and not value > 0.0:
            return f"{name} must be positive where it is set, got {value:g}."
    if not 0.0 <= a.alpha <= 1.0:
        return f"alpha must lie in [0, 1] (product to geometric mean), got {a.alpha:g}."
    if a.dual_clip is not None and not a.dual_clip > 1.0:
        return f"dual_clip must be above 1, got {a.dual_clip:g}."
    if not a.reject_high > 0.0 or (a.reject.endswith("k1") and a.reject_high <= a.reject_low):
        return f"reject_high {a.reject_high:g} must be above reject_low {a.reject_low:g}."
    if a.reject.endswith("k1") and not a.reject_low < 1.0 < a.reject_high:
        return (
            f"the bounds {a.reject_low:g}..{a.reject_high:g} (reject_low, reject_high) must contain"
            " 1, the ratio of what the policy itself sampled."
        )
    if a.veto is not None and a.veto >= 1.0:
        return (
            f"veto must be below 1, the weight of what the policy itself sampled, got {a.veto:g}."
        )
    if a.history_length < 0:
        return f"history_length must not be negative, got {a.history_length}."
    return ""


def _combination_problem(a: "AlgorithmConfig", has_critic: bool) -> str:
    if a.clip_low > 1.0 and a.clipping in ("clip", "band"):
        return f"clip_low {a.clip_low:g} leaves no ratio below 1 to clip; use at most 1."
    if a.clipping != "clip" and a.ratio not in TOKEN_RATIOS:
        return f"clipping {a.clipping!r} works on token ratios; set ratio = 'token'."
    if a.dual_clip is not None and a.clipping != "clip":
        return f"dual_clip belongs to clipping 'clip', not {a.clipping!r}; set dual_clip = 'none'."
    if a.clip_bias != "none" and a.clipping != "clip":
        return "clip_bias measures what clipping 'clip' removed; set clipping = 'clip'."
    if a.clip_bias != "none" and a.ratio == "calibrated" and a.centre:
        return "clip_bias is measured before mu is known; set centre = false."
    if a.behaviour_floor is not None and a.behaviour_floor >= a.behaviour_cap:
        return (
            f"behaviour_floor {a.behaviour_floor:g} must be below"
            f" behaviour_cap {a.behaviour_cap:g}."
        )
    if a.behaviour_weight != "none" and not (a.behaviour_floor or 0.0) <= 1.0 <= a.behaviour_cap:
        return (
            f"the weights' bounds {a.behaviour_floor or 0.0:g}..{a.behaviour_cap:g}"
            " (behaviour_floor, behaviour_cap) must contain 1, the weight of what the policy itself"
            " sampled."
        )
    if a.behaviour_weight == "token" and (a.ratio == "calibrated" or a.clipping == "gmpo"):
        return (
            "a weight per token cannot multiply a ratio per action; set behaviour_weight = 'geo'."
        )
    if a.ratio == "behaviour" and a.behaviour_weight != "none":
        return (
            "ratio 'behaviour' already divides by the behaviour policy;"
            " set behaviour_weight = 'none'."
        )
    if a.drop_flat_groups and has_critic:
        return (
            f"drop_flat_groups needs group credit, but {a.credit!r} uses a critic; set it to false."
        )
    if a.value_clip is not None and not has_critic:
        return (
            f"value_clip needs a critic, but credit {a.credit!r} has none; set value_clip = 'none'."
        )
    return ""
