"""Packed segments as tensors. T tokens, S segments, k actions, n trained tokens of one microbatch.

Segments lie one behind the other on one row, without padding; `cu_seqlens` keeps them apart.
`actions` and `tokens` say which of the whole batch's actions and trained tokens these are, so
that anything known per action or per token of the batch is picked by plain indexing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from capo.learner.segments import Segment


class PlacedSegment(Struct, frozen=True):
    """A segment, and where its first action stands in the batch's flat order.

    The actions of a segment are consecutive steps, so the others follow.
    """

    segment: Segment
    first_action: int
    first_token: int


class Microbatch(Struct, frozen=True):
    """One forward pass. An empty one (padding of a rank's plan) is a single context token."""

    token_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], from 0 in every segment
    cu_seqlens: Tensor  # int32 [S + 1]
    max_length: int
    predictors: Tensor  # int64 [n], positions whose hidden state predicts a trained token
    labels: Tensor  # int64 [n], the trained tokens
    action_of_token: Tensor  # int64 [n], 0..k-1
    boundaries: Tensor  # int64 [k], the last prompt token of every action
    actions: Tensor  # int64 [k], index into the batch's actions
    tokens: Tensor  # int64 [n], index into the batch's trained tokens
    last_tokens: Tensor  # int64 [S], the last position of every segment

    @property
    def num_actions(self) -> int:
        return int(self.boundaries.shape[0])


EMPTY = PlacedSegment(Segment(np.zeros(1, dtype=np.int32), ()), 0, 0)


def collate(placed: Sequence[PlacedSegment], device: torch.device) -> Microbatch:
    """The tensors of one microbatch, segments in the given order."""
    placed = placed or (EMPTY,)
    lengths = np.array([len(one.segment.token_ids) for one in placed])
    ends = np.cumsum(lengths)
    offsets = ends - lengths

    spans = [
        (offset + span.start, offset + span.end, one.first_action + rank)
        for offset, one in zip(offsets.tolist(), placed, strict=True)
        for rank, span in enumerate(one.segment.actions)
    ]
    starts, stops, actions = np.array(spans, dtype=np.int64).reshape(-1, 3).T
    sizes = stops - starts  # [k]
    trained = _ranges(starts, sizes)
    tokens_per_segment = np.array(
        [sum(span.end - span.start for span in one.segment.actions) for one in placed]
    )
    first_tokens = np.array([one.first_token for one in placed], dtype=np.int64)
    token_ids = np.concatenate([one.segment.token_ids for one in placed]).astype(np.int64)

    def tensor(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    return Microbatch(
        token_ids=tensor(token_ids),
        position_ids=tensor(_ranges(np.zeros_like(lengths), lengths)),
        cu_seqlens=tensor(np.concatenate([[0], ends]), torch.int32),
        max_length=int(lengths.max()),
        predictors=tensor(trained - 1),
        labels=tensor(token_ids[trained]),
        action_of_token=tensor(np.repeat(np.arange(len(sizes)), sizes)),
        boundaries=tensor(starts - 1),
        actions=tensor(actions),
        tokens=tensor(_ranges(first_tokens, tokens_per_segment)),
        last_tokens=tensor(ends - 1),
    )


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The ranges `start .. start + size`, one behind the other, int64 [sum of sizes]."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    ranges: np.ndarray = np.arange(total) + np.repeat(starts - (ends - sizes), sizes)
    return ranges
