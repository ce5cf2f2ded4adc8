"""Fleets for tests; what one leaves behind is ended with the test."""

from pathlib import Path

import pytest

from tests.chaos.fleet import Fleet


@pytest.fixture
def start_fleet(tmp_path: Path):
    fleets: list[Fleet] = []

    def start(*overrides: str, folder: Path | None = None, seed: int = 0) -> Fleet:
        fleets.append(Fleet(folder or tmp_path / f"fleet-{len(fleets)}", seed, overrides))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.__exit__()
