"""KL estimators: unbiased where they claim to be, non-negative where they claim to be."""

import pytest
import torch

from capo.learner.kl import kl_estimate, mismatch
from tests.recorded import close, vector


def test_expectations_over_a_small_vocabulary() -> None:
    """E_pi[k1] = E_pi[k3] = KL(pi || ref), computed exactly."""
    pi = vector([0.5, 0.3, 0.2])
    reference = vector([0.4, 0.4, 0.2])
    exact = (pi * (pi / reference).log()).sum()
    for name in ("k1", "k3"):
        close((pi * kl_estimate(pi.log(), reference.log(), name)).sum(), exact)


@pytest.mark.parametrize("name", ["abs", "k2", "k3"])
def test_never_negative_and_zero_at_equality(name: str) -> None:
    current = vector([-1.0, -2.0, -0.3])
    assert bool((kl_estimate(current, current - vector([0.5, -0.5, 0.0]), name) >= 0).all())
    close(kl_estimate(current, current, name), torch.zeros(3))


def test_expected_gradients_over_a_small_vocabulary() -> None:
    """k2's and the straight-through ones are the KL's, k3's the reverse KL's, k1's nothing."""
    logits = vector([0.3, -0.2, 0.9, 0.0]).requires_grad_()
    reference = vector([0.0, 0.5, 0.1, -0.4]).log_softmax(0)
    current = logits.log_softmax(0)
    probabilities = current.detach().exp()  # the sampled tokens are given

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        return found

    def of_estimator(name: str) -> torch.Tensor:
        return gradient((probabilities * kl_estimate(current, reference, name)).sum())

    forward = gradient((current.exp() * (current - reference)).sum())
    reverse = gradient((reference.exp() * (reference - current)).sum())
    for name in ("k2", "k1+", "k3+"):
        close(of_estimator(name), forward)
    close(of_estimator("k3"), reverse)
    close(of_estimator("k1"), torch.zeros(4, dtype=torch.float64), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("name", ["k1+", "k3+"])
def test_straight_through_has_one_value_and_k2s_gradient(name: str) -> None:
    current = vector([-1.0, -2.0]).requires_grad_()
    reference = vector([-1.3, -1.9])
    value = kl_estimate(current, reference, name)
    close(value.detach(), kl_estimate(current.detach(), reference, name[:-1]))
    value.sum().backward()
    assert current.grad is not None
    close(current.grad, current.detach() - reference)


def test_huge_gaps_stay_finite() -> None:
    current = vector([-1000.0, 0.0]).requires_grad_()
    value = kl_estimate(current, vector([0.0, -1000.0]), "k3")
    close(value.detach(), [10.0, 10.0])
    value.sum().backward()
    assert current.grad is not None
    close(current.grad, [0.0, 0.0])


def test_the_reference_gets_no_gradient() -> None:
    reference = vector([-1.0]).requires_grad_()
    assert not kl_estimate(vector([-2.0]), reference, "k3").requires_grad


def test_mismatch_is_from_behaviour_to_proximal() -> None:
    close(mismatch(vector([-1.0]), vector([-1.5]), "k1"), [0.5])


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="Unknown KL estimator 'k4'"):
        kl_estimate(vector([0.0]), vector([0.0]), "k4")
