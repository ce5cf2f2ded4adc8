import os

import pytest
import torch
from torch import nn

from capo.learner.engines import TrainEngine
from capo.learner.ranks import join

# DeepSpeed's ZeRO imports torch's compiler, which uses what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def inputs(seed):
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))


def test_a_process_alone_forms_a_group_and_leaves_its_environment_as_it_was():
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    ranks = join()
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before
    total = torch.ones(3)
    assert ranks.sum(total) is total
    assert join() == ranks


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_accumulated_steps_are_those_of_adamw_with_clipping(zero_stage):
    engine = TrainEngine(
        model(), join(), zero_stage=zero_stage, weight_decay=0.1, max_grad_norm=0.5
    )
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for number in range(3):
        batch = inputs(number)
        for part, last in ((batch[:5], False), (batch[5:], True)):
            engine.backward(engine.forward(part).square().sum(), 16, last=last)
        norm = engine.step(1e-2)
        optimizer.zero_grad()
        (plain(batch).square().sum() / 16).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        assert norm == pytest.approx(float(expected), rel=1e-5)
    for ours, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_restored_engine_goes_on_with_the_same_bits(zero_stage):
    first = TrainEngine(model(), join(), zero_stage=zero_stage)
    trained(first, 0)
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    second = TrainEngine(model(), join(), zero_stage=zero_stage)
    trained(second, 9)
    second.load_state(saved)
    trained(first, 1)
    trained(second, 1)
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_restoring_before_the_first_step_forgets_the_moments():
    fresh = TrainEngine(model(), join())
    saved = {name: tensor.clone() for name, tensor in fresh.state().items()}
    assert all(name.startswith("master.") for name in saved)
    used = TrainEngine(model(), join())
    trained(used, 0)
    used.load_state(saved)
    trained(fresh, 1)
    trained(used, 1)
    for ours, theirs in zip(fresh.model.parameters(), used.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_state_of_another_model_is_refused_and_changes_nothing():
    engine = TrainEngine(model(), join())
    before = {name: tensor.clone() for name, tensor in engine.state().items()}
    other = dict(before)
    other["master.0.weight"] = torch.zeros(8, 5)
    with pytest.raises(ValueError, match=r"0\.weight is \(8, 5\) there and \(8, 4\) here"):
        engine.load_state(other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state().items())


def test_weights_come_in_order_and_whole():
    engine = TrainEngine(model(), join())
    names = [name for name, _ in engine.weights()]
    assert names == [name for name, _ in engine.model.named_parameters()]


def trained(engine, seed):
    engine.backward(engine.forward(inputs(seed)).square().sum(), 16, last=True)
    engine.step(1e-2)
