"""Credit by comparison within groups of equals, without a critic.

R rows with one number each and a group id; ids need not be dense. The outcome methods use one row
per episode, the state methods one per action.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from capo.learner.ragged import check_rows

FLAT_TOLERANCE = 1e-8  # a standard deviation below this times the scores' scale is none


class Comparison(NamedTuple):
    advantages: Tensor  # [R]
    contrast: Tensor  # bool [R]: False in singletons and in groups of (nearly) equal scores


def standardised(
    scores: Tensor,
    group_of_row: Tensor,
    divide_by_std: bool = True,
    weights: Tensor | None = None,
    raw_singletons: bool = True,
    epsilon: float = 1e-6,
) -> Comparison:
    """(x - mean) / (std + epsilon) within each group, std unbiased (GRPO, arXiv 2402.03300 sec.
    4.1.2); without the division Dr. GRPO's (arXiv 2503.20783), or OPO's with weights.

    Groups of equal scores get 0 whatever rounding says.

    Args:
        scores: [R].
        group_of_row: int64 [R].
        weights: [R], by which rows enter the mean (not the std).
        raw_singletons: a group of one keeps its score (mean 0, std 1), otherwise gets 0.
    """
    check_rows(scores.shape[0], "rows", group_of_row)
    groups = _Groups(group_of_row)
    means = groups.mean(scores, weights)
    stds = groups.std(scores)
    scale = groups.mean(scores.abs()).clamp(min=1.0)
    alone = groups.sizes == 1
    flat = ~alone & (stds <= FLAT_TOLERANCE * scale)
    if raw_singletons:
        means = torch.where(alone, 0.0, means)
    centred = torch.where(flat[groups.row], 0.0, scores - means[groups.row])
    if divide_by_std:
        centred = centred / (torch.where(alone, 1.0, stds) + epsilon)[groups.row]
    return Comparison(centred, ~(alone | flat)[groups.row])


def leave_one_out(scores: Tensor, group_of_row: Tensor) -> Comparison:
    """x - mean of the others = (x - mean) n / (n - 1); 0 for a singleton (RLOO, arXiv 2402.14740
    eq. 7)."""
    centred = standardised(scores, group_of_row, divide_by_std=False, raw_singletons=False)
    sizes = _Groups(group_of_row).row_sizes.to(scores)
    return Comparison(centred.advantages * sizes / (sizes - 1).clamp(min=1), centred.contrast)


def whitened(values: Tensor, epsilon: float = 1e-8, inside_root: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + epsilon), variance unbiased, over all rows; fewer than two rows stay.

    `inside_root` False adds epsilon to the standard deviation instead.
    """
    if values.numel() < 2:
        return values
    centred = values - values.mean()
    if inside_root:
        return centred * torch.rsqrt(values.var() + epsilon)
    return centred / (values.std() + epsilon)


def group_means(scores: Tensor, group_of_row: Tensor) -> Tensor:
    """Each row's group mean -> [R]."""
    groups = _Groups(group_of_row)
    return groups.mean(scores)[groups.row]


def dense_ids(keys: list[tuple[int | str, ...]]) -> Tensor:
    """Equal keys to equal numbers, in order of appearance -> int64 [R]."""
    seen: dict[tuple[int | str, ...], int] = {}
    return torch.tensor([seen.setdefault(key, len(seen)) for key in keys], dtype=torch.int64)


class _Groups:
    """G groups over R rows."""

    def __init__(self, group_of_row: Tensor) -> None:
        _, self.row = torch.unique(group_of_row, return_inverse=True)  # [R], 0..G-1
        self.sizes = torch.bincount(self.row)  # [G]

    @property
    def row_sizes(self) -> Tensor:
        return self.sizes[self.row]

    def mean(self, scores: Tensor, weights: Tensor | None = None) -> Tensor:
        if weights is None:
            weights = torch.ones_like(scores)
        return self._sum(scores * weights) / self._sum(weights)

    def std(self, scores: Tensor) -> Tensor:
        squares = (scores - self.mean(scores)[self.row]).square()
        return (self._sum(squares) / (self.sizes - 1).clamp(min=1)).sqrt()

    def _sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(len(self.sizes)).index_add(0, self.row, values)
