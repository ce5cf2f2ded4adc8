"""The metrics' two logs, and what a resumed run takes back."""

import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from capo.learner.metrics_log import MetricsLog, read_metrics


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    with MetricsLog(tmp_path, clock=lambda: 12.5) as log:
        log.write(1, {"loss": 0.25, "variance": math.nan})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[0]) == {
            "version": 1,
            "time": 12.5,
            "loss": 0.25,
            "variance": None,
        }


def test_tensorboard_gets_the_same_numbers(tmp_path):
    with MetricsLog(tmp_path) as log:
        for version in (1, 2):
            log.write(version, {"ratio/mu": version / 4})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("ratio/mu")] == [
        (1, 0.25),
        (2, 0.5),
    ]


def test_a_resumed_run_takes_back_what_it_will_write_again(tmp_path):
    with MetricsLog(tmp_path) as log:
        for version in (1, 2, 3, 4):
            log.write(version, {"loss": float(version)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"version": 5, "lo')  # the crash
    with MetricsLog(tmp_path, resume_at=2) as log:
        log.write(3, {"loss": 30.0})
    assert [(line["version"], line["loss"]) for line in read_metrics(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == [1.0, 2.0, 30.0]


@pytest.mark.parametrize("text", ["", '{"version": 1, "loss": 2.0}\n{"versi'])
def test_a_line_in_the_making_is_not_read(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert len(read_metrics(tmp_path)) == text.count("\n")
    assert read_metrics(tmp_path / "nowhere") == []
