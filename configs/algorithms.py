"""The algorithm's table: which part is composed with which. Presets are compositions, not classes.

Formulas, sources and defaults of every part: docs/algorithms.md.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from capo.configs.algorithm_checks import problem
from capo.configs.presets import PRESETS
from capo.configs.words import choices, nearest


class AlgorithmConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """CAPO (arXiv 2604.18401) by default. "none" switches off what a preset sets where the default
    here is none."""

    preset: str = "capo"

    # credit assignment
    credit: Literal[
        "action_gae",
        "token_gae",
        "brace",
        "vtrace",
        "group",
        "rloo",
        "reinforce_pp",
        "gigpo",
        "gagpo",
        "g2po",
        "hgpo",
    ] = "action_gae"
    gamma: float = 0.99
    lam: float = 1.0
    bootstrap_truncated: bool = True  # the paper: False, value 0 after any end
    trace_steps: Literal[1, 2, 3] = 2  # brace: corrected steps before the Monte-Carlo tail
    trace_rho_cap: float = 1.0
    trace_c_cap: float = 1.0
    group_std: bool = True  # divide by the group's standard deviation
    group_weighting: Literal["episode", "action"] = "episode"  # gigpo: what a group averages over
    drop_flat_groups: bool = False  # groups without contrast leave the batch
    step_weight: float = 1.0  # gigpo, g2po: weight of the step-level terms
    success_reward: float = 1.0  # g2po: what the node after a solved episode is worth
    history_length: int = 2  # hgpo
    history_power: float = 1.0  # hgpo
    whiten: Literal["none", "action", "token"] = "none"

    # ratio, clipping, aggregation
    ratio: Literal["calibrated", "sequence", "token", "behaviour"] = "calibrated"
    alpha: float = 0.5  # calibrated: the length's exponent
    centre: bool = True  # calibrated: centre on the minibatch mean mu
    clipping: Literal["clip", "cispo", "gmpo", "band", "soft_gate", "tv"] = "clip"
    clip_low: float = 1e-3
    clip_high: float = 1e-3
    dual_clip: float | None = None
    gate_positive: float = 1.0  # soft_gate: temperature for positive advantages
    gate_negative: float = 1.05
    clip_bias: Literal["none", "max_one", "one_plus", "norm"] = "none"
    aggregation: Literal["action_mean", "token_mean", "action_sum", "action_sum_norm"] = (
        "action_mean"
    )
    length_norm: float = 1024.0  # action_sum_norm: the constant length, in tokens

    # regularisation
    kl_coefficient: float = 1e-3
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"

    # staleness and engine noise
    behaviour_weight: Literal["geo", "prod", "sqrt", "token", "none"] = "geo"
    behaviour_cap: float = 2.0
    behaviour_floor: float | None = None
    behaviour_beyond: Literal["truncate", "mask"] = "truncate"  # what happens beyond cap and floor
    behaviour_normalise: bool = False  # weights get mean 1 over the batch
    veto: float | None = None  # an action with a token weight below this is dropped
    estr_tau: float | None = None  # entropy-normalised token mask
    m2_threshold: float | None = None  # second-moment token mask
    reject: Literal[
        "none",
        "token_k1",
        "token_k2",
        "token_k3",
        "action_sum_k1",
        "action_sum_k2",
        "action_sum_k3",
        "action_mean_k1",
        "action_mean_k2",
        "action_mean_k3",
        "action_max_k2",
        "action_max_k3",
    ] = "none"
    reject_low: float = 0.5  # k1 only: bounds of behaviour / proximal
    reject_high: float = 2.0  # k1: of that ratio; k2, k3: of the divergence, in nats

    # critic
    value_clip: float | None = None


_OPTIONAL = frozenset(
    field.name for field in msgspec.structs.fields(AlgorithmConfig) if field.default is None
)
_CRITIC: Mapping[str, Literal["boundary", "token"]] = {
    "action_gae": "boundary",
    "brace": "boundary",
    "vtrace": "boundary",
    "token_gae": "token",
}
_STATE_CREDIT = ("gigpo", "gagpo", "g2po", "hgpo")


def needs_groups(algorithm: AlgorithmConfig) -> bool:
    """Whether several episodes of one task are compared: whole groups must arrive together."""
    return not needs_critic(algorithm)


def compares_returns(algorithm: AlgorithmConfig) -> bool:
    """Whether a group's credit is from its episodes' returns alone: equal ones then say nothing."""
    return algorithm.credit in ("group", "rloo", "reinforce_pp")


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    return algorithm.credit in _CRITIC


def critic_reads(algorithm: AlgorithmConfig) -> Literal["boundary", "token", "none"]:
    """Where the critic is read: before every action, before every action token, or not at all."""
    return _CRITIC.get(algorithm.credit, "none")


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    return algorithm.kl_coefficient > 0


def needs_entropy(algorithm: AlgorithmConfig) -> bool:
    """Whether actors must record the behaviour policy's entropy per token."""
    return algorithm.estr_tau is not None


def needs_state_keys(algorithm: AlgorithmConfig) -> bool:
    """Whether steps of a group are compared by equal observations."""
    return algorithm.credit in _STATE_CREDIT


def is_centred(algorithm: AlgorithmConfig) -> bool:
    """Whether ratios are centred on mu, the mean of the token log-ratios over the minibatch."""
    return algorithm.ratio == "calibrated" and algorithm.centre


def needs_logprob_statistics(algorithm: AlgorithmConfig) -> bool:
    """Whether the minibatch's statistics depend on the current policy, so that they need a pass
    of their own before the pass with gradient."""
    return is_centred(algorithm) or algorithm.clip_bias != "none"


def resolve(raw: str | Mapping[str, Any]) -> AlgorithmConfig:
    """A preset's name, or a table with `preset` and overrides, as a checked AlgorithmConfig.

    `clip` sets both sides, "none" switches an optional part off. A table that states everything
    else, as a recorded one does, has also said which of these are off. Raises ValueError with one
    sentence: unknown preset or key, wrong type, impossible combination.
    """
    table: dict[str, Any] = {"preset": raw} if isinstance(raw, str) else dict(raw)
    preset = table.setdefault("preset", "capo")
    if preset == "react":
        raise ValueError(
            "react is prompting without training: leave the algorithm as it is and play held-out"
            " games with `capo run CONFIG --set updates=0 --set evaluation.after=false"
            " --set 'evaluation.modes=[\"greedy\"]'`."
        )
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"Unknown algorithm {preset!r}; {nearest(str(preset), list(PRESETS))}")
    if "clip" in table:
        if "clip_low" in table or "clip_high" in table:
            raise ValueError("Give either algorithm.clip or algorithm.clip_low and clip_high.")
        clip = table.pop("clip")
        table |= {"clip_low": clip, "clip_high": clip}
    fields = AlgorithmConfig.__struct_fields__
    for key in table:
        if key not in fields:
            raise ValueError(f"Unknown key 'algorithm.{key}'; {nearest(key, [*fields, 'clip'])}")
    table |= {key: None for key in _OPTIONAL if table.get(key) == "none"}
    base = {} if {*fields} - _OPTIONAL <= {*table} else PRESETS[preset]
    try:
        algorithm = msgspec.convert({**base, **table}, AlgorithmConfig)
    except msgspec.ValidationError as error:
        message, _, place = str(error).replace("`", "").partition(" - at $.")
        message = message.replace("float | null", 'float or "none"')
        possible = choices(AlgorithmConfig, place)
        if possible:
            message = f"{message.rpartition(' ')[2]} is not possible; " + nearest(
                str(table[place]), possible
            )
        raise ValueError(f"algorithm.{place}: {message}") from error
    check(algorithm)
    return algorithm


def check(algorithm: AlgorithmConfig) -> None:
    """Refuse what cannot be computed or makes no sense, with a sentence."""
    found = problem(algorithm, needs_critic(algorithm))
    if found:
        raise ValueError(f"algorithm: {found}")
