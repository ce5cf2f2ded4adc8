"""Slow definitions, written like the papers: the ground truth where no recorded case is.

Plain Python over lists; one action is one list of token numbers.
"""

import math
from collections.abc import Callable, Sequence
from statistics import mean, pstdev, stdev

Numbers = Sequence[float]
Rows = Sequence[Numbers]
Score = Callable[[int, int], float]


def batch_mean(z: Rows) -> float:
    """mu of CAPO's eq. 4: over all tokens of all actions."""
    tokens = [value for row in z for value in row]
    return mean(tokens) if tokens else 0.0


def calibrated_ratio(z: Numbers, alpha: float, mu: float) -> float:
    """CAPO's eq. 4 with a general exponent."""
    return math.exp(mu + sum(value - mu for value in z) / len(z) ** alpha)


def capo_loss(
    z: Rows, advantages: Numbers, alpha: float, mu: float, clip: float, weights: Numbers
) -> float:
    """-J of CAPO's eq. 5 as a mean over actions, each under its behaviour weight; an action without
    tokens contributes 0 to the sum and is not counted."""
    actions = [(row, a, w) for row, a, w in zip(z, advantages, weights, strict=True) if row]
    total = 0.0
    for row, advantage, weight in actions:
        ratio = calibrated_ratio(row, alpha, mu)
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        total += weight * min(ratio * advantage, bounded * advantage)
    return -total / max(len(actions), 1)


def capo_gradient(
    z: Rows, advantages: Numbers, alpha: float, mu: float, clip: float, weights: Numbers
) -> list[list[float]]:
    """CAPO's eq. 6 for every token: -A w / L^alpha / K under the weight, 0 where clipping binds."""
    count = max(sum(1 for row in z if row), 1)
    found = []
    for row, advantage, weight in zip(z, advantages, weights, strict=True):
        if not row:
            found.append([])
            continue
        ratio = calibrated_ratio(row, alpha, mu)
        binds = (advantage > 0 and ratio > 1 + clip) or (advantage < 0 and ratio < 1 - clip)
        slope = 0.0 if binds else -weight * advantage * ratio / len(row) ** alpha / count
        found.append([slope] * len(row))
    return found


def token_surrogate(
    z: Rows, advantages: Rows, clip: float, aggregation: str, length_norm: float
) -> float:
    """PPO's clipped loss over tokens under each way of averaging."""
    sums = []
    for row, row_advantages in zip(z, advantages, strict=True):
        losses = []
        for value, advantage in zip(row, row_advantages, strict=True):
            ratio = math.exp(value)
            bounded = min(max(ratio, 1 - clip), 1 + clip)
            losses.append(-min(ratio * advantage, bounded * advantage))
        sums.append((sum(losses), len(losses)))
    sums = [(total, count) for total, count in sums if count]
    if not sums:
        return 0.0
    if aggregation == "token_mean":
        return sum(total for total, _ in sums) / sum(count for _, count in sums)
    if aggregation == "action_mean":
        return mean(total / count for total, count in sums)
    norm = length_norm if aggregation == "action_sum_norm" else 1.0
    return mean(total for total, _ in sums) / norm


def gae(rewards: Numbers, values: Numbers, tail: float, gamma: float, lam: float) -> list[float]:
    """A_t = sum_l (gamma lambda)^l delta_{t+l}, as the sum it is defined by, for one episode."""
    after = [*values[1:], tail]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def returns_to_go(rewards: Numbers, tail: float, gamma: float) -> list[float]:
    steps = range(len(rewards))
    return [
        sum(gamma ** (k - t) * rewards[k] for k in steps if k >= t)
        + gamma ** (len(rewards) - t) * tail
        for t in steps
    ]


def vtrace_targets(
    rewards: Numbers,
    values: Numbers,
    weights: Numbers,
    tail: float,
    gamma: float,
    lam: float,
    rho_cap: float,
    c_cap: float,
) -> list[float]:
    """Eq. 1 of arXiv 1802.01561: the sum over later steps of discounted, truncated corrections."""
    after = [*values[1:], tail]
    found = []
    for s in range(len(rewards)):
        target, trace = values[s], 1.0
        for t in range(s, len(rewards)):
            delta = min(rho_cap, weights[t]) * (rewards[t] + gamma * after[t] - values[t])
            target += gamma ** (t - s) * trace * delta
            trace *= lam * min(c_cap, weights[t])
        found.append(target)
    return found


def brace_targets(
    rewards: Numbers,
    values: Numbers,
    weights: Numbers,
    tail: float,
    gamma: float,
    rho_cap: float,
    c_cap: float,
    num_steps: int,
) -> list[float]:
    """BRACE for one episode, unrolled: V_s, `num_steps` discounted, truncated corrections, and, if
    the episode is not over by then, the Monte-Carlo return's distance from the value there."""
    length = len(rewards)
    after = [*values[1:], tail]
    returns = returns_to_go(rewards, tail, gamma)
    found = []
    for s in range(length):
        target, trace = values[s], 1.0
        for t in range(s, min(s + num_steps, length)):
            delta = min(rho_cap, weights[t]) * (rewards[t] + gamma * after[t] - values[t])
            target += gamma ** (t - s) * trace * delta
            trace *= min(c_cap, weights[t])
        anchor = s + num_steps
        if anchor < length:
            target += gamma**num_steps * trace * (returns[anchor] - values[anchor])
        found.append(target)
    return found


def standardised(
    scores: Numbers,
    epsilon: float = 1e-6,
    *,
    by_std: bool = True,
    ddof: int = 1,
    raw_single: bool = True,
) -> list[float]:
    """(x - mean) / (std + epsilon), ddof 1; zeros where all are equal; a single score stays, or
    counts as equal to itself (`raw_single` False)."""
    if len(scores) == 1 and raw_single:
        return [scores[0] / (1.0 + epsilon) if by_std else scores[0]]
    if max(scores) - min(scores) < 1e-9:
        return [0.0] * len(scores)
    spread = (stdev if ddof else pstdev)(scores) + epsilon if by_std else 1.0
    return [(x - mean(scores)) / spread for x in scores]


def reinforce_pp(
    rewards: Rows, lengths: Sequence[Sequence[int]], gamma: float
) -> list[list[list[float]]]:
    """For the episodes of one group: per episode, action and token, the discounted return over all
    later tokens of the episode minus the group's mean score. Rewards sit on last tokens."""
    baseline = mean(sum(row) for row in rewards)
    found = []
    for row, counts in zip(rewards, lengths, strict=True):
        per_token = [
            reward if i == count - 1 else 0.0
            for reward, count in zip(row, counts, strict=True)
            for i in range(count)
        ]
        flat = [value - baseline for value in returns_to_go(per_token, 0.0, gamma)]
        actions = []
        for count in counts:
            actions.append(flat[:count])
            flat = flat[count:]
        found.append(actions)
    return found


def gagpo(
    rewards: Rows, states: Sequence[Sequence[str]], gamma: float, lam: float, epsilon: float = 1e-6
) -> list[list[float]]:
    """For the episodes of one group: GAE over the mean return-to-go of equal states, standardised
    over all steps of the group."""
    returns = [returns_to_go(row, 0.0, gamma) for row in rewards]
    visits: dict[str, list[float]] = {}
    for row, keys in zip(returns, states, strict=True):
        for value, key in zip(row, keys, strict=True):
            visits.setdefault(key, []).append(value)
    raw = [
        gae(row, [mean(visits[key]) for key in keys], 0.0, gamma, lam)
        for row, keys in zip(rewards, states, strict=True)
    ]
    everything = [value for row in raw for value in row]
    spread = stdev(everything) if len(everything) > 1 else 0.0
    if spread < 1e-8:
        return [[0.0] * len(row) for row in raw]
    return [[(value - mean(everything)) / (spread + epsilon) for value in row] for row in raw]


def g2po(
    rewards: Rows,
    states: Sequence[Sequence[str]],
    gamma: float,
    step_weight: float,
    by_std: bool,
    success_reward: float,
) -> list[list[float]]:
    """For the episodes of one group: the episode's score compared over all actions, plus
    step_weight times the value of the node reached, compared among the actions that leave the same
    node, and the gain in value, compared over all actions."""
    places = [(e, t) for e, row in enumerate(rewards) for t in range(len(row))]
    scores = [sum(row) for row in rewards]

    def same_node(e: int, t: int) -> list[tuple[int, int]]:
        key = states[e][t]
        return [(f, u) for f, u in places if states[f][u] == key] if key else [(e, t)]

    def worth(e: int, t: int) -> float:
        if t == len(rewards[e]):
            return scores[e] if scores[e] == success_reward else 0.0
        return mean(gamma ** (len(rewards[f]) - u) * scores[f] for f, u in same_node(e, t))

    def compared(one: tuple[int, int], among: list[tuple[int, int]], of: Score, raw: bool) -> float:
        all_scores = [of(e, t) for e, t in among]
        return standardised(all_scores, by_std=by_std, raw_single=raw)[among.index(one)]

    found = [[0.0] * len(row) for row in rewards]
    for e, t in places:
        episode = compared((e, t), places, lambda f, u: scores[f], True)
        reached = compared((e, t), same_node(e, t), lambda f, u: worth(f, u + 1), False)
        gain = compared((e, t), places, lambda f, u: worth(f, u + 1) - worth(f, u), False)
        found[e][t] = episode + step_weight * (reached + gain)
    return found


def hgpo(
    rewards: Rows,
    states: Sequence[Sequence[str]],
    gamma: float,
    history_length: int,
    power: float,
    by_std: bool,
) -> list[list[float]]:
    """For the episodes of one group: the return-to-go compared, population std, among the actions
    whose state and last l states are the same, averaged over the levels l = 0..history_length where
    it differs from the mean, level l with weight (l + 1)^power."""
    places = [(e, t) for e, row in enumerate(rewards) for t in range(len(row))]
    returns = [returns_to_go(row, 0.0, gamma) for row in rewards]
    found = [[0.0] * len(row) for row in rewards]
    for e, t in places:
        total, weight = 0.0, 0.0
        for level in range(min(history_length, t) + 1):
            history = states[e][t - level : t + 1]
            equals = [
                (f, u)
                for f, u in places
                if (f, u) == (e, t)
                or (u >= level and "" not in history and states[f][u - level : u + 1] == history)
            ]
            scores = [returns[f][u] for f, u in equals]
            compared = standardised(scores, by_std=by_std, ddof=0, raw_single=False)
            advantage = compared[equals.index((e, t))]
            if abs(advantage) > 1e-9:
                total += (level + 1) ** power * advantage
                weight += (level + 1) ** power
        found[e][t] = total / weight if weight else 0.0
    return found
