"""What a record's values must satisfy, one broken field at a time."""

import math

import numpy as np
import pytest

from capo.protocol.errors import ProtocolError
from capo.protocol.messages import (
    ActorHeartbeat,
    Delivery,
    Goodbye,
    GroupAccept,
    GroupFormed,
    Ready,
    WeightsReport,
)
from capo.protocol.records import EpisodeStatus, VersionSpan
from capo.protocol.validate import (
    check_control,
    check_delivery,
    check_end,
    check_hello,
    check_step,
)
from tests.protocol.wire import make_end, make_hello, make_step


def test_the_smallest_valid_records_pass():
    check_hello(make_hello())
    check_delivery(Delivery(sequence=1, steps=(make_step(),), ends=(make_end(),)))


def test_a_step_that_only_repeats_its_prompt_passes():
    check_step(make_step(index=1, keep=5, observation=np.zeros(0, np.int32)))


def test_an_action_of_two_policies_passes():
    check_step(make_step(length=3, versions=(VersionSpan(4, 1), VersionSpan(5, 2))))


FLOATS = np.float32


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"episode_id": ""}, "episode_id is empty"),
        ({"episode_id": "x" * 257}, "episode_id has 257 characters; at most 256"),
        ({"index": -1}, "index is -1"),
        ({"index": 2**31}, "index is 2147483648"),
        ({"keep": -1, "index": 1}, "keep is -1"),
        ({"keep": 2}, "nothing comes before the first step"),
        ({"observation": np.zeros(0, np.int32)}, "its prompt is empty"),
        ({"observation": np.array([1, -7], np.int32)}, "negative token id -7"),
        ({"observation": np.zeros(2, np.int64)}, "observation is int64"),
        ({"observation": np.zeros((2, 2), np.int32)}, r"observation is int32 \[2, 2\]"),
        ({"length": 0, "versions": ()}, "its action is empty"),
        ({"action": np.array([1, -7], np.int32)}, "negative token id -7"),
        ({"action": np.zeros(2, np.float32)}, "action is float32"),
        ({"behaviour_logprobs": np.zeros(3, FLOATS)}, "3 behaviour_logprobs for an action of 2"),
        ({"behaviour_logprobs": np.array([0, np.nan], FLOATS)}, "not all finite"),
        ({"behaviour_logprobs": np.array([-np.inf, 0], FLOATS)}, "not all finite"),
        ({"behaviour_logprobs": np.zeros(2, np.float64)}, "behaviour_logprobs is float64"),
        ({"entropies": np.zeros(1, FLOATS)}, "1 entropies for an action of 2"),
        ({"entropies": np.array([0, np.inf], FLOATS)}, "entropies are not all finite"),
        ({"versions": ()}, "cover 0 tokens, but its action has 2"),
        ({"versions": (VersionSpan(0, 1),)}, "cover 1 tokens, but its action has 2"),
        ({"versions": (VersionSpan(0, 2), VersionSpan(1, 1))}, "cover 3 tokens"),
        ({"versions": (VersionSpan(0, 3), VersionSpan(0, -1))}, "length of a version span is -1"),
        ({"versions": (VersionSpan(-1, 2),)}, "policy version is -1"),
        ({"reward": math.nan}, "reward is nan"),
        ({"reward": -math.inf}, "reward is -inf"),
        ({"state_key": "x" * 70_000}, "state_key has 70000 characters"),
        ({"info": {str(n): 0.0 for n in range(257)}}, "info has 257 entries"),
        ({"info": {"x" * 300: 0.0}}, "a key of info has 300 characters"),
    ],
)
def test_a_broken_step_is_refused_with_its_reason(fields, sentence):
    with pytest.raises(ProtocolError, match=sentence):
        check_step(make_step(**fields))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"episode_id": ""}, "episode_id is empty"),
        ({"num_steps": -1}, "num_steps is -1"),
        ({"outcome": math.nan}, "outcome is nan"),
        ({"final_keep": -3}, "final_keep is -3"),
        ({"final_observation": np.ones(1, np.int32)}, "not to one that is terminated"),
        ({"status": EpisodeStatus.TRUNCATED}, "no final observation to bootstrap"),
        (
            {"status": EpisodeStatus.TRUNCATED, "final_observation": np.zeros(0, np.int32)},
            "its final prompt is empty",
        ),
        (
            {"status": EpisodeStatus.TRUNCATED, "final_observation": np.array([-1], np.int32)},
            "negative token id -1",
        ),
        ({"error": "x" * 70_000}, "error has 70000 characters"),
        ({"metrics": {str(n): 0.0 for n in range(257)}}, "metrics has 257 entries"),
    ],
)
def test_a_broken_end_is_refused_with_its_reason(fields, sentence):
    with pytest.raises(ProtocolError, match=sentence):
        check_end(make_end(**fields))


def test_a_truncated_end_carries_the_next_prompt():
    check_end(
        make_end(
            status=EpisodeStatus.TRUNCATED, final_keep=9, final_observation=np.ones(1, np.int32)
        )
    )


def test_an_episode_cut_before_its_first_step_needs_no_bootstrap():
    check_end(make_end(status=EpisodeStatus.TRUNCATED, num_steps=0))


@pytest.mark.parametrize("sequence", [0, -1, 2**60])
def test_a_delivery_counts_from_one(sequence):
    with pytest.raises(ProtocolError, match="they count from 1"):
        check_delivery(Delivery(sequence=sequence, steps=(make_step(),)))


def test_an_empty_delivery_is_refused():
    with pytest.raises(ProtocolError, match="carries no records"):
        check_delivery(Delivery(sequence=1))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"actor_id": ""}, "actor_id is empty"),
        ({"actor_id": "x" * 300}, "actor_id has 300 characters"),
        ({"actor_name": "x" * 300}, "actor_name has 300 characters"),
        ({"capacity": 0}, "capacity is 0"),
        ({"weights_version": -2}, "weights_version is -2"),
        ({"transports": ("gloo",) * 17}, "17 transports"),
        ({"held_leases": ("",)}, "held lease is empty"),
    ],
)
def test_a_broken_hello_is_refused_with_its_reason(fields, sentence):
    with pytest.raises(ProtocolError, match=sentence):
        check_hello(make_hello(**fields))


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (Ready(weights_version=-2), "Ready: weights_version is -2"),
        (ActorHeartbeat(running=-1), "ActorHeartbeat: running is -1"),
        (ActorHeartbeat(waiting_for="x" * 70_000), "waiting_for has 70000 characters"),
        (ActorHeartbeat(held_leases=("",)), "held lease is empty"),
        (ActorHeartbeat(metrics={str(n): 0.0 for n in range(300)}), "metrics has 300 entries"),
        (GroupAccept(epoch=-1), "GroupAccept: epoch is -1"),
        (GroupAccept(epoch=1, workers=0), "workers is 0"),
        (GroupAccept(epoch=1, workers=2**30), "1073741824 workers; at most 4096"),
        (GroupFormed(epoch=2**60), "GroupFormed: epoch is 1152921504606846976"),
        (GroupFormed(epoch=1, error="x" * 70_000), "error has 70000 characters"),
        (WeightsReport(epoch=1, version=-1), "WeightsReport: version is -1"),
        (WeightsReport(epoch=1, version=1, pause_s=math.inf), "pause_s is inf"),
        (WeightsReport(epoch=1, version=1, checksum="x" * 300), "checksum has 300 characters"),
        (Goodbye(reason="x" * 70_000), "Goodbye: reason has 70000 characters"),
    ],
)
def test_an_impossible_control_message_is_refused(message, sentence):
    with pytest.raises(ProtocolError, match=sentence):
        check_control(message)


@pytest.mark.parametrize(
    "message",
    [
        Ready(),
        ActorHeartbeat(held_leases=("a.1",), metrics={"busy": 0.5}),
        GroupAccept(epoch=1_800_000_000_000, workers=8),
        GroupFormed(epoch=1_800_000_000_000, error="no route"),
        WeightsReport(epoch=1, version=3, probe_logprobs=np.array([np.nan], FLOATS)),
        Goodbye(reason="done"),
    ],
)
def test_a_possible_control_message_passes(message):
    check_control(message)
