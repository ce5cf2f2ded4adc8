"""Actions with the sum of their tokens' log-ratios: made by a known law, or read from a run file.

A actions. From length L, S = sum of z and the minibatch's mean mu the ratio of every alpha follows,
w = exp(mu + (S - L mu) / L^alpha), so a run need not keep z token by token.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from capo.configs.algorithms import AlgorithmConfig, resolve
from capo.learner.results import MinibatchResult, UpdateResult, decode
from capo.learner.run_reader import RunReader

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

TOKEN_SD = 1.5e-3  # of synthetic z: puts half of the actions out of range at a clip of 1e-3
TOKEN_MEAN = -5e-5  # a policy that learns makes what it sampled before a little less likely
LENGTHS = (1, 512)
MIN_DOUBLINGS = 2.0  # of length, between the 5th and 95th percentile, to judge a trend in it


class Actions(Struct, frozen=True, kw_only=True, eq=False):
    """`source` is a title for people. `mu` is that of the action's minibatch."""

    source: str
    length: Integers  # [A], tokens
    z_sum: Floats  # [A]
    mu: Floats  # [A]
    advantage: Floats  # [A]
    clip_low: float
    clip_high: float

    @property
    def centred_sum(self) -> Floats:
        """Sum over an action's tokens of z - mu -> [A]."""
        centred: Floats = self.z_sum - self.length * self.mu
        return centred

    @property
    def doublings(self) -> float:
        """How often length doubles between its 5th and 95th percentile."""
        low, high = np.percentile(self.length, (5, 95))
        return float(np.log2(high / low))

    @property
    def reservation(self) -> str:
        """A clause that a verdict starts with, "" if lengths differ enough for one."""
        if self.doublings >= MIN_DOUBLINGS:
            return ""
        low, high = np.percentile(self.length, (5, 95))
        return (
            f"lengths of {low:g} to {high:g} tokens (5 to 95 %) are too alike to tell length from"
            f" what kind of action it is; with this in mind, "
        )

    def log_ratio(self, alpha: float) -> Floats:
        """As `learner.ratios.calibrated_log_ratio` has it, without its numerical limit -> [A]."""
        scaled: Floats = self.mu + self.centred_sum / self.length**alpha
        return scaled


def synthetic(exponent: float, num_actions: int, seed: int, clip: float = 1e-3) -> Actions:
    """Gaussian z whose sum over L tokens has a variance of TOKEN_SD^2 L^exponent, exactly.

    The tokens are drawn as one long path of fractional Gaussian noise (independent for exponent 1)
    that is cut into actions of log-uniform lengths. Advantages have random signs.
    """
    generator = np.random.default_rng(seed)
    low, high = np.log(LENGTHS[0]), np.log(LENGTHS[1] + 1)
    length = np.exp(generator.uniform(low, high, num_actions)).astype(np.int64)
    z = TOKEN_MEAN + TOKEN_SD * fractional_noise(exponent, int(length.sum()), generator)
    name = "independent" if exponent == 1 else "correlated"
    return Actions(
        source=f"synthetic z, {name} tokens: variance ~ length^{exponent:g}",
        length=length,
        z_sum=np.add.reduceat(z, np.cumsum(length) - length),
        mu=np.full(num_actions, z.mean()),
        advantage=generator.choice([-1.0, 1.0], num_actions),
        clip_low=clip,
        clip_high=clip,
    )


def fractional_noise(exponent: float, count: int, generator: np.random.Generator) -> Floats:
    """A stationary Gaussian path [count] of unit variance; sums over L have variance L^exponent.

    Exact, by circulant embedding (Davies and Harte 1987). `exponent` in (0, 2).
    """
    if not 0 < exponent < 2:
        raise ValueError(f"the variance of sums can grow as length^(0..2), not ^{exponent:g}")
    half = 1 << max(1, (count - 1).bit_length())
    lag = np.arange(half + 1, dtype=np.float64)
    covariance = 0.5 * ((lag + 1) ** exponent - 2 * lag**exponent + np.abs(lag - 1) ** exponent)
    spectrum = np.fft.rfft(np.concatenate([covariance, covariance[-2:0:-1]])).real.clip(min=0)
    white = np.fft.rfft(generator.standard_normal(2 * half))
    path: Floats = np.fft.irfft(white * np.sqrt(spectrum), 2 * half)[:count]
    return path


def from_run(run: Path, versions: Sequence[int] = (), clip: float | None = None) -> Actions:
    """The actions of recorded updates: of `versions`, or of the last one that is done.

    Left out are minibatches whose policy had not moved yet (every z is 0) and actions that took no
    part. Raises ValueError with a sentence if the z of this run cannot be told or never moved.
    """
    with RunReader(run) as reader:
        algorithm = reader.config().algorithm
        done = [update.version for update in reader.updates() if update.status == "done"]
        if not done:
            raise ValueError(f"{run} holds no finished update yet")
        chosen = list(versions) or done[-1:]
        results = [decode(reader.update_result(version)) for version in chosen]
    parts = [
        part
        for result in results
        for minibatch in result.minibatches
        if minibatch.log_ratio.any()
        for part in [_part(result, minibatch, algorithm)]
    ]
    named = ", ".join(str(version) for version in chosen)
    if len(chosen) > 3:
        named = f"{chosen[0]} to {chosen[-1]} ({len(chosen)} of them)"
    if not parts:
        raise ValueError(
            f"the policy did not move in update {named} of {run}: every z is 0; choose another"
            f" --update of {done[0]}..{done[-1]}"
        )
    length, z_sum, mu, advantage = (np.concatenate(column) for column in zip(*parts, strict=True))
    plural = "s" if len(chosen) > 1 else ""
    return Actions(
        source=f"{algorithm.preset} run, update{plural} {named}",
        length=length,
        z_sum=z_sum,
        mu=mu,
        advantage=advantage,
        clip_low=algorithm.clip_low if clip is None else clip,
        clip_high=algorithm.clip_high if clip is None else clip,
    )


def z_sums(log_ratio: Floats, length: Integers, mu: float, algorithm: AlgorithmConfig) -> Floats:
    """The sum of z of every action, from the log-ratio that its own algorithm recorded -> [k].

    Args:
        log_ratio: [k], as in `MinibatchResult`: of the action, or its tokens' mean.
        length: [k]; mu: of the minibatch, as recorded.

    Raises:
        ValueError: the algorithm clips or masks tokens before it sums, or measures no z.
    """
    masks = (algorithm.estr_tau, algorithm.m2_threshold)
    if algorithm.clipping == "gmpo" or algorithm.ratio == "behaviour":
        raise ValueError(f"a {algorithm.preset} run records no sums of z; take another run")
    bounds = algorithm.behaviour_weight == "token" and algorithm.behaviour_beyond == "mask"
    if any(mask is not None for mask in masks) or algorithm.reject != "none" or bounds:
        raise ValueError(f"a {algorithm.preset} run masks tokens before it sums; take another run")
    if algorithm.ratio != "calibrated":
        return log_ratio * length
    centre = mu if algorithm.centre else 0.0
    scale = length.astype(np.float64) ** algorithm.alpha
    return length * centre + (log_ratio - centre) * scale


def _part(
    result: UpdateResult, minibatch: MinibatchResult, algorithm: AlgorithmConfig
) -> tuple[Integers, Floats, Floats, Floats]:
    """length, z_sum, mu and advantage of a minibatch's actions that took part."""
    rows = minibatch.actions[minibatch.units > 0]
    length = result.actions.length[rows]
    z = z_sums(minibatch.log_ratio[minibatch.units > 0], length, minibatch.mu, algorithm)
    mu = z.sum() / max(length.sum(), 1)
    return length, z, np.full(len(rows), mu), result.actions.advantage[rows]


DEFAULT_CLIP = resolve("capo").clip_low
