"""The row of an update, as a person reads it."""

import io

import pytest
from rich.console import Console

from capo.launch.progress import Progress

METRICS = {
    "batch/outcome": 0.5,
    "batch/return": -0.25,
    "ratio/out_of_range": 0.42,
    "policy/mu": -4.7e-4,
    "system/tokens_per_s": 950.0,
    "staleness/mean": 1.0,
    "time/wait_s": 0.0,
    "time/update_s": 1.236,
    "time/sync_s": 0.11,
    "actors/busy_fraction": 1.0,
}


def row(total: int = 200, **changed: float) -> str:
    text = io.StringIO()
    names = {name: name.replace("_", "/", 1) for name in changed}
    values = {names[name]: value for name, value in changed.items()}
    Progress(Console(file=text, width=200), total).update(7, {**METRICS, **values})
    return text.getvalue().splitlines()[1]


def test_a_row_has_one_cell_for_each_column():
    expected = "7/200 0.50 -0.25 0.42 -4.7e-04 950 1.0 0.00 s 1.24 s 0.11 s 100%"
    assert " ".join(row().split()) == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (9.99, "9.99 s"),
        (9.996, "10.0 s"),
        (24.54, "24.5 s"),
        (99.96, "100 s"),
        (321.4, "321 s"),
        (999.6, "17 min"),
        (86_400.0, "1,440 min"),
    ],
)
def test_times_have_three_digits(seconds, text):
    assert f" {text} " in row(time_wait_s=seconds)


def test_however_large_the_numbers_no_two_cells_touch():
    large = row(
        10_000_000,
        system_tokens_per_s=123_456_789.0,
        staleness_mean=12_345.0,
        time_wait_s=1e6,
        time_update_s=1e6,
        time_sync_s=1e6,
    )
    assert "7/10000000 0.50 " in " ".join(large.split())
    assert len(large.split()) == len(row().split())


def test_what_is_not_measured_is_a_dash():
    text = io.StringIO()
    Progress(Console(file=text, width=200), 3).update(1, {})
    assert text.getvalue().splitlines()[1].split() == ["1/3", *"-" * 10]
