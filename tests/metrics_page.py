"""docs/metrics.md as patterns: which names of metrics it describes."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
COHORTS = {
    "/length_L": r"/length_\d+(_\d+)?",
    "/turn_T": r"/turn_\d+(_\d+|_up)?",
    "/staleness_S": r"/staleness_\d+(_\d+|_up)?",
    "/advantage_": r"/advantage_(positive|negative|zero)",
}


def described_names() -> Iterator[tuple[str, str]]:
    """(name without its cohort suffixes, pattern of the full names), for every name of a table."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        cell = line.split(" | ")[0]
        names, _, added = cell.partition("(+")
        suffixes = [
            pattern
            for suffix, pattern in COHORTS.items()
            if suffix in added or "all suffixes" in added
        ]
        optional = f"({'|'.join(suffixes)})?" if suffixes else ""
        for name in re.findall(r"`([^`]+)`", names):
            base = next((name.removesuffix(one) for one in COHORTS if name.endswith(one)), name)
            cohort = COHORTS.get(name.removeprefix(base), "")
            yield base, re.escape(base) + cohort + optional


def undescribed(names: Iterable[str]) -> set[str]:
    """Those of `names` that the page says nothing about."""
    patterns = re.compile("|".join(pattern for _, pattern in described_names()))
    return {name for name in names if not patterns.fullmatch(name)}


def missing(names: Iterable[str]) -> set[str]:
    """What the page describes, but none of `names` is."""
    names = list(names)
    return {
        base
        for base, pattern in described_names()
        if not any(re.fullmatch(pattern, name) for name in names)
    }
