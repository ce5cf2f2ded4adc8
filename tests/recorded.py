"""The recorded numeric cases beside the checkout, from padded rows to flat vectors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent.parent.parent / "shared" / "oracles"

FP64 = {"rtol": 1e-10, "atol": 1e-10}
FP32 = {"rtol": 2e-5, "atol": 2e-5}  # cases that passed through fp32 where they were recorded


def cases(number: str, having: str = "") -> list[Any]:
    """The cases of the fixture file whose name starts with `number`, as pytest parameters: all, or
    those with an input called `having`."""
    found = sorted(FOLDER.glob(f"{number}_*.json"))
    if not found:
        skip = pytest.mark.skip(reason=f"no recorded cases {number}_* in {FOLDER}")
        return [pytest.param(None, marks=skip, id=f"{number}-missing")]
    recorded = json.loads(found[0].read_text())["cases"]
    return [
        pytest.param(case, id=case["id"])
        for case in recorded
        if not having or having in case["inputs"]
    ]


class Rows:
    """R padded rows of L places under a mask, as N flat tokens of R actions."""

    def __init__(self, mask: list[list[float]]) -> None:
        self.mask = torch.tensor(mask, dtype=torch.float64) > 0  # [R, L]
        self.num_actions = len(mask)
        self.action_of_token = torch.nonzero(self.mask)[:, 0]  # int64 [N]

    def flat(self, matrix: list[list[float]]) -> Tensor:
        """[R, L] -> [N]."""
        return torch.tensor(matrix, dtype=torch.float64)[self.mask]

    def first(self, matrix: list[list[float]]) -> Tensor:
        """[R, L] whose rows are constant under the mask -> [R]; 0 for a row that is all masked."""
        places = torch.tensor(matrix, dtype=torch.float64)
        index = self.mask.to(torch.int64).argmax(dim=1)
        return places.gather(1, index.unsqueeze(1)).squeeze(1) * self.mask.any(dim=1)

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(dim=1).to(torch.float64)


def vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def numbered(names: list[str]) -> Tensor:
    """Equal names to equal numbers, in order of appearance."""
    seen: dict[str, int] = {}
    return torch.tensor([seen.setdefault(name, len(seen)) for name in names])


def close(found: Tensor | float, expected: Tensor | float | list[Any], **tolerance: float) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        **(tolerance or FP64),
    )
