"""Presets: in what each differs from CAPO, as plain values of `AlgorithmConfig`'s fields.

A preset is a composition, so any field can be overridden. Formulas, sources and what we changed:
docs/algorithms.md.
"""

from typing import Any

_GROUP: dict[str, Any] = {
    "credit": "group",
    "ratio": "token",
    "centre": False,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "aggregation": "token_mean",
    "behaviour_weight": "none",
}
_TOKEN_CRITIC: dict[str, Any] = {
    **_GROUP,
    "credit": "token_gae",
    "gamma": 1.0,
    "whiten": "token",
    "dual_clip": 3.0,
    "value_clip": 0.5,
}

PRESETS: dict[str, dict[str, Any]] = {
    "capo": {},
    "capo_released": {
        "ratio": "sequence",
        "centre": False,
        "clip_low": 3e-4,
        "clip_high": 3e-4,
        "whiten": "action",
        "value_clip": 0.5,
        "bootstrap_truncated": False,
        "behaviour_weight": "none",
    },
    "ppo": _TOKEN_CRITIC,
    "reinforce_pp": {**_GROUP, "credit": "reinforce_pp", "gamma": 1.0, "whiten": "token"},
    "grpo": _GROUP,
    "rloo": {**_GROUP, "credit": "rloo"},
    "gspo": {
        **_GROUP,
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 3e-4,
        "aggregation": "action_mean",
    },
    "gigpo": {**_GROUP, "credit": "gigpo", "gamma": 0.95},
    "st_ppo": {
        **_TOKEN_CRITIC,
        "ratio": "sequence",
        "dual_clip": None,
        "aggregation": "action_mean",
        "clip_bias": "one_plus",
    },
    "gagpo": {
        **_GROUP,
        "credit": "gagpo",
        "gamma": 0.95,
        "lam": 0.8,
        "ratio": "calibrated",
        "alpha": 1.0,
        "aggregation": "action_mean",
    },
    "dapo": {
        **_GROUP,
        "clip_high": 0.28,
        "drop_flat_groups": True,
        "kl_coefficient": 0.0,
    },
    "dr_grpo": {
        **_GROUP,
        "group_std": False,
        "aggregation": "action_sum_norm",
        "kl_coefficient": 0.0,
    },
    "cispo": {**_GROUP, "clipping": "cispo", "clip_low": 1.0, "clip_high": 0.2},
    "gmpo": {
        **_GROUP,
        "clipping": "gmpo",
        "clip_low": 0.4,
        "clip_high": 0.4,
        "aggregation": "action_mean",
    },
    "decoupled_ppo": {
        **_TOKEN_CRITIC,
        "behaviour_weight": "token",
        "behaviour_cap": 5.0,
        "behaviour_beyond": "mask",
    },
    "tis": {**_GROUP, "behaviour_weight": "token", "behaviour_cap": 2.0},
    "icepop": {
        **_GROUP,
        "behaviour_weight": "token",
        "behaviour_cap": 5.0,
        "behaviour_floor": 0.5,
        "behaviour_beyond": "mask",
    },
    "mis": {
        **_GROUP,
        "behaviour_weight": "geo",
        "behaviour_cap": 2.0,
        "behaviour_floor": 0.5,
        "behaviour_beyond": "mask",
    },
    "m2po": {**_GROUP, "m2_threshold": 0.04},
    "sao": {
        **_TOKEN_CRITIC,
        "ratio": "behaviour",
        "clipping": "band",
        "dual_clip": None,
        "clip_low": 0.2,
        "clip_high": 0.28,
    },
    "estr": {"estr_tau": 0.05},
    "brace": {"credit": "brace", "trace_rho_cap": 1.2, "trace_c_cap": 1.1},
    "vtrace": {"credit": "vtrace"},
    "g2po": {**_GROUP, "credit": "g2po", "gamma": 0.95, "group_std": False},
    "hgpo": {**_GROUP, "credit": "hgpo", "gamma": 0.95},
}
