"""The simulated fleet plays by the rules: real leases, whole episodes, nothing lost or doubled."""

import argparse

import pytest

from benchmarks._fleet_load import STEPS_PER_EPISODE, Load
from benchmarks._fleet_others import bare_pyzmq, pickle_queue
from benchmarks.fleet import allow_files, line, run
from capo.learner.run_endings import chain_fault
from capo.protocol.validate import check_delivery

LOAD = Load(prompt_tokens=60, kept_tokens=40, action_tokens=5, steps_per_delivery=4)


def test_its_episodes_are_valid_and_its_prompts_are_rebuilt():
    deliveries = LOAD.round()
    for delivery in deliveries:
        check_delivery(delivery)
    steps = [delivery.steps[0] for delivery in deliveries]
    assert [step.index for step in steps] == list(range(STEPS_PER_EPISODE))
    assert {step.keep + len(step.observation) for step in steps} == {60}
    parts = [(step.keep, len(step.observation), len(step.action)) for step in steps]
    assert chain_fault(parts, None, 65) == ""
    assert [len(delivery.ends) for delivery in deliveries] == [0] * 9 + [4]


@pytest.mark.parametrize("storage", ["run file", "nothing"])
def test_everything_that_was_acked_is_there_once(tmp_path, storage):
    options = argparse.Namespace(seconds=0.5, actor_processes=2, folder=tmp_path)
    stage = run(5, storage, LOAD, options)
    assert [told.fault for told in stage.told] == ["", ""]
    assert sum(told.acked_steps for told in stage.told) == stage.closed.stored_steps > 0
    assert stage.lost_steps == 0
    assert stage.closed.excluded_episodes == 0
    assert stage.closed.stats.refused == stage.closed.stats.gaps == 0
    assert (stage.closed.num_batches > 0) == (storage == "run file")
    assert line(stage).split()[0] == "5"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("transport", [bare_pyzmq, pickle_queue])
def test_the_alternatives_move_something(transport):
    rate = transport(LOAD, 0.2)
    assert rate.steps_per_s > 0
    assert rate.processor_us > 0


def test_more_connections_than_open_files_are_refused():
    with pytest.raises(SystemExit, match=r"need \d+ open files a process, and \d+ are allowed"):
        allow_files(10**9)
