"""What an algorithm is composed of, told to a person: one line per part."""

import msgspec

from capo.configs.algorithm_checks import CREDIT_READS, TOKEN_RATIOS, without_effect
from capo.configs.algorithms import AlgorithmConfig, critic_reads, needs_critic, needs_reference
from capo.configs.presets import PRESETS


def algorithm_lines(algorithm: AlgorithmConfig) -> list[str]:
    """Its parts, and last the changes of its preset that have no effect, if there are any."""
    a, changed = algorithm, _changes(algorithm)
    lines = [
        f"preset: {a.preset}" + (f" with {', '.join(changed.values())}" if changed else ""),
        f"credit: {_credit_line(a)}",
        f"ratio: {_ratio_line(a)}, against the "
        + ("behaviour" if a.ratio == "behaviour" else "proximal")
        + " log-probs",
        f"clipping: {_clipping_line(a)}",
        f"aggregation: {a.aggregation}"
        + (f" over {a.length_norm:g} tokens" if a.aggregation == "action_sum_norm" else ""),
        f"KL: {a.kl_coefficient:g} x {a.kl_estimator} to the reference"
        if needs_reference(a)
        else "KL: none, no reference model",
        f"behaviour: {_behaviour_line(a)}",
        f"critic: at every {critic_reads(a)}, value clip {a.value_clip or 'off'}"
        if needs_critic(a)
        else "critic: none; needs groups of episodes of the same task",
    ]
    if silent := changes_without_effect(a):
        lines.append(f"without effect in this composition: {', '.join(silent)}")
    return lines


def changes_without_effect(algorithm: AlgorithmConfig) -> list[str]:
    """The changes of its preset, as "key=value", that nothing reads as its parts are composed."""
    unread = without_effect(algorithm)
    return [text for name, text in _changes(algorithm).items() if name in unread]


def _changes(a: AlgorithmConfig) -> dict[str, str]:
    """In what it differs from its preset: "key=value" by key."""
    preset = msgspec.convert({**PRESETS.get(a.preset, {}), "preset": a.preset}, AlgorithmConfig)
    return {
        name: f"{name}={getattr(a, name)}"
        for name in a.__struct_fields__
        if getattr(a, name) != getattr(preset, name)
    }


def _credit_line(a: AlgorithmConfig) -> str:
    bootstrap = "on" if a.bootstrap_truncated else "off"
    told = {
        "gamma": f"gamma {a.gamma:g}",
        "lam": f"lambda {a.lam:g}",
        "trace_steps": f"{a.trace_steps} corrected steps",
        "trace_rho_cap": f"caps {a.trace_rho_cap:g}/{a.trace_c_cap:g}",
        "group_std": f"{'' if a.group_std else 'not '}divided by the std",
        "group_weighting": f"group means over {a.group_weighting}s",
        "step_weight": f"step weight {a.step_weight:g}",
        "success_reward": f"a solved end worth {a.success_reward:g}",
        "history_length": f"history {a.history_length}, level weights ^{a.history_power:g}",
        "bootstrap_truncated": f"bootstrap after truncation {bootstrap}",
    }
    parts = [a.credit, *(text for key, text in told.items() if key in CREDIT_READS[a.credit])]
    if a.drop_flat_groups:
        parts.append("groups without contrast dropped")
    if a.whiten != "none":
        parts.append(f"whitened over {a.whiten}s")
    return ", ".join(parts)


def _ratio_line(a: AlgorithmConfig) -> str:
    if a.ratio != "calibrated":
        return f"per {'token' if a.ratio in TOKEN_RATIOS else 'action (geometric mean)'}"
    centring = "centred on the minibatch mean" if a.centre else "not centred"
    return f"per action, sum over length^{a.alpha:g}, {centring}"


def _clipping_line(a: AlgorithmConfig) -> str:
    if a.clipping == "soft_gate":
        return f"soft_gate, temperature +{a.gate_positive:g}/-{a.gate_negative:g}"
    where = {"gmpo": " in log space", "tv": " in probability"}.get(a.clipping, "")
    parts = [f"{a.clipping} -{a.clip_low:g}/+{a.clip_high:g}{where}"]
    if a.dual_clip is not None:
        parts.append(f"dual clip {a.dual_clip:g}")
    if a.clip_bias != "none":
        parts.append(f"normalised by the clipping bias ({a.clip_bias})")
    return ", ".join(parts)


def _behaviour_line(a: AlgorithmConfig) -> str:
    parts = []
    if a.behaviour_weight != "none":
        floor = f"{a.behaviour_floor:g}.." if a.behaviour_floor is not None else ""
        parts.append(
            f"{a.behaviour_weight} weight, {a.behaviour_beyond} at {floor}{a.behaviour_cap:g}"
            + (", normalised to mean 1" if a.behaviour_normalise else "")
        )
    if a.reject != "none":
        low = f"{a.reject_low:g}.." if a.reject.endswith("k1") else ""
        parts.append(f"reject by {a.reject} beyond {low}{a.reject_high:g}")
    for name in ("veto", "estr_tau", "m2_threshold"):
        value = getattr(a, name)
        if value is not None:
            parts.append(f"{name} {value:g}")
    return ", ".join(parts) or "no correction"
