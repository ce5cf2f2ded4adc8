"""What a run came to, as sentences and rows for a person."""

from collections.abc import Mapping, Sequence

from capo.learner.evaluation_round import ModeResult
from capo.learner.run_reader import RunReader

OUTCOME_COLUMNS = ("version", "play", "success", "return", "steps", "games")


def evaluations_of(reader: RunReader) -> list[tuple[int, dict[str, ModeResult]]]:
    """(version, results by mode) of all finished evaluations, in order."""
    return [
        (row.version, row.results) for row in reader.evaluations() if row.finished_at is not None
    ]


def evaluation_line(version: int, results: Mapping[str, ModeResult]) -> str:
    parts = [
        f"{mode} {_success(result)} of {result.episodes} games" for mode, result in results.items()
    ]
    return f"Evaluation at version {version}: {', '.join(parts)}."


def outcome_rows(
    evaluations: Sequence[tuple[int, Mapping[str, ModeResult]]],
) -> list[tuple[str, ...]]:
    """One row per version and mode: version, mode, success, return, steps, games."""
    return [
        (
            str(version),
            mode,
            _success(result),
            f"{result.mean_return:.3f}",
            f"{result.mean_steps:.1f}",
            str(result.episodes) + (f" ({result.given_up} given up)" if result.given_up else ""),
        )
        for version, results in evaluations
        for mode, result in results.items()
    ]


def _success(result: ModeResult) -> str:
    return f"{result.success:.1%} ± {result.success_stderr:.1%}"
