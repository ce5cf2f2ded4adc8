import pytest

from capo.learner.schedule import learning_rate


def rates(count, **settings):
    return [learning_rate(step, base=1.0, total_steps=count, **settings) for step in range(count)]


def test_constant_without_warmup_and_decay():
    assert rates(4, warmup_steps=0, final_factor=1.0) == [1.0] * 4


def test_warmup_rises_linearly_and_wastes_no_step():
    assert rates(5, warmup_steps=4, final_factor=1.0) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_decay_ends_at_the_factor_and_stays_there():
    assert rates(5, warmup_steps=0, final_factor=0.0) == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    after = learning_rate(9, base=2.0, warmup_steps=0, total_steps=5, final_factor=0.1)
    assert after == pytest.approx(0.2)


def test_a_single_step_has_the_full_rate():
    assert rates(1, warmup_steps=0, final_factor=0.1) == [1.0]
