import math

import msgspec
import numpy as np
import pytest

from capo.learner.results import (
    ActionResults,
    MinibatchResult,
    UpdateResult,
    compare,
    decode,
    encode,
)


def result(**changes) -> UpdateResult:
    whole = UpdateResult(
        version=3,
        episode_ids=("a.0", "b.0"),
        actions=ActionResults(
            episode=np.array([0, 1]),
            step=np.array([0, 0]),
            length=np.array([2, 5]),
            advantage=np.array([0.1, -0.0]),
            weight=np.array([1.0, 2.0]),
            kept=np.array([True, False]),
            counted=np.array([True, True]),
            value=np.array([0.5, math.nan]),
        ),
        minibatches=(
            MinibatchResult(
                epoch=0,
                episodes=np.array([0, 1]),
                actions=np.array([0, 1]),
                mu=1e-5,
                policy_loss=0.25,
                kl=0.0,
                policy_grad_norm=1.0,
                policy_lr=1e-6,
                log_ratio=np.array([0.0, math.log(1.5)]),
                units=np.ones(2),
                out_of_range=np.zeros(2),
                active=np.zeros(2),
            ),
        ),
        metrics={"policy/loss": 0.25},
        phases={"policy": 1.5},
    )
    return msgspec.structs.replace(whole, **changes)


def test_a_record_survives_encoding_bit_for_bit():
    decoded = decode(encode(result()))
    assert compare(result(), decoded) == []
    assert decoded.phases == {"policy": 1.5}
    assert decoded.minibatches[0].critic_loss is None
    assert decoded.actions.kept.dtype == np.bool_
    np.testing.assert_allclose(decoded.minibatches[0].ratio, [1.0, 1.5])


def test_phases_are_no_difference():
    assert compare(result(), result(phases={"policy": 9.0})) == []


def changed_actions(**columns):
    return result(actions=msgspec.structs.replace(result().actions, **columns))


def changed_minibatch(**fields):
    return result(minibatches=(msgspec.structs.replace(result().minibatches[0], **fields),))


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (result(version=4), "version"),
        (result(episode_ids=("a.0", "c.0")), "episode_ids[1]"),
        (result(metrics={"policy/loss": 0.5}), "metrics[policy/loss]"),
        (result(metrics={}), "metrics[policy/loss]"),
        (result(minibatches=()), "minibatches"),
        (changed_minibatch(mu=math.nextafter(1e-5, 1)), "minibatches[0].mu"),
        (changed_minibatch(critic_loss=0.0), "minibatches[0].critic_loss"),
        (changed_actions(advantage=np.array([0.1, 0.0])), "actions.advantage[1]"),  # not -0.0
        (changed_actions(value=np.array([0.5, 0.0])), "actions.value[1]"),
        (changed_actions(value=None), "actions.value"),
        (changed_actions(kept=np.array([False, False])), "actions.kept[0]"),
        (changed_actions(length=np.array([2])), "actions.length"),
    ],
)
def test_every_changed_bit_is_named(other, name):
    (difference,) = compare(result(), other)
    assert difference.name == name
    assert difference.recorded != difference.replayed


def test_a_changed_array_says_how_much_of_it_changed():
    (difference,) = compare(result(), changed_actions(advantage=np.array([0.2, 0.3])))
    assert difference.recorded == "np.float64(0.1) (2 of 2 differ)"
    assert difference.replayed == "np.float64(0.2)"


@pytest.mark.parametrize("blob", [b"", b"\xc1", encode(result())[:-1]])
def test_a_torn_record_is_a_value_error(blob):
    with pytest.raises(ValueError, match=r".+"):
        decode(blob)


def test_an_array_of_objects_is_never_decoded():
    blob = encode(changed_actions(advantage=np.array([0.1, 0.2])))
    with pytest.raises(ValueError, match="dtype"):
        decode(blob.replace(b"<f8", b"|O8", 1))
