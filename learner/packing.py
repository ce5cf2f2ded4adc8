"""Which segments go into which microbatch of which rank: a pure function of their lengths.

First-fit decreasing decides how many microbatches are needed; then the segments are spread so that
microbatches are alike, because ranks wait for each other at every one. Knows no tokens.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace

Plan = tuple[tuple[tuple[int, ...], ...], ...]  # [rank][microbatch] -> segment indices


def pack(lengths: Sequence[int], token_budget: int, num_ranks: int = 1) -> Plan:
    """Every segment in exactly one microbatch of at most `token_budget` tokens.

    All ranks get the same number of microbatches, some possibly empty. The same arguments give
    the same plan. Raises ValueError for a segment that is longer than the budget.
    """
    for index, length in enumerate(lengths):
        if length > token_budget:
            raise ValueError(
                f"segment {index} has {length} tokens, but the token budget of a microbatch is "
                f"{token_budget}; raise learner.token_budget to at least {length}"
            )
    if not lengths:
        return ((),) * num_ranks
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    tight = _first_fit(lengths, order, token_budget)
    per_rank = -(-len(tight) // num_ranks)
    bins = _spread(lengths, order, token_budget, per_rank * num_ranks)
    if bins is None:
        bins = tight + [[] for _ in range(per_rank * num_ranks - len(tight))]
    return _deal([sorted(bin_) for bin_ in bins], lengths, num_ranks)


def _first_fit(lengths: Sequence[int], order: list[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = lengths[index]
        place = next((i for i, free in enumerate(room) if length <= free), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
        bins[place].append(index)
        room[place] -= length
    return bins


def _spread(
    lengths: Sequence[int], order: list[int], budget: int, num_bins: int
) -> list[list[int]] | None:
    """Longest first into the emptiest bin: even, but None where that does not fit the budget."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, place) for place in range(num_bins)]
    heapify(loads)
    for index in order:
        load, place = loads[0]
        if load + lengths[index] > budget:
            return None
        bins[place].append(index)
        heapreplace(loads, (load + lengths[index], place))
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], num_ranks: int) -> Plan:
    """Bins of similar load run at the same time; the rank with least so far gets the largest."""

    def load(bin_: list[int]) -> int:
        return sum(lengths[index] for index in bin_)

    bins = sorted(bins, key=lambda bin_: (-load(bin_), bin_))
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for first in range(0, len(bins), num_ranks):
        emptiest = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, bin_ in zip(emptiest, bins[first : first + num_ranks], strict=True):
            ranks[rank].append(tuple(bin_))
            totals[rank] += load(bin_)
    return tuple(tuple(microbatches) for microbatches in ranks)
