"""The metrics of whole updates in float64, against slow definitions: masks, versions, prompts."""

import msgspec
import numpy as np
import pytest
import torch

from capo.configs.algorithms import resolve
from capo.learner.action_metrics import variance_slope
from capo.learner.batch import build_batch
from capo.learner.microbatch import collate
from capo.learner.ranks import join
from capo.learner.update import run_update
from tests.factories import random_episode, run_config, tiny_policy
from tests.learner.exact import exact_models

ENTROPY = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("policy"))


class Listening:
    """The policy's engine; `current` collects the log-probs of its passes with gradient."""

    def __init__(self, engine, num_tokens):
        self._engine = engine
        self.model, self.backward, self.step = engine.model, engine.backward, engine.step
        self.current = np.full(num_tokens, np.nan)

    def forward(self, microbatch, temperature):
        logprobs, entropies = self._engine.forward(microbatch, temperature)
        self.current[microbatch.tokens.numpy()] = logprobs.detach().numpy()
        return logprobs, entropies


def played(groups=10, size=4):
    """Groups of four episodes; all members of every fifth group did alike."""
    episodes = []
    for number in range(groups * size):
        group = number // size
        one = random_episode(number, num_steps=2 + number % 3, group_id=f"group-{group}")
        steps = [
            msgspec.structs.replace(
                step, entropies=np.full(len(step.action), ENTROPY, dtype=np.float32)
            )
            for step in one.steps
        ]
        if group % 5 == 0:
            steps[-1] = msgspec.structs.replace(steps[-1], reward=1.0)
        episodes.append(msgspec.structs.replace(one, steps=tuple(steps)))
    return episodes


def proximal_of(model, batch):
    found = np.full(batch.num_tokens, np.nan)
    with torch.no_grad():
        for placed in batch.segments:
            microbatch = collate(placed, torch.device("cpu"))
            found[microbatch.tokens.numpy()] = model(microbatch, 1.0)[0].numpy()
    return found


def kept_by_m2(squares, threshold):
    """Drop the largest until the mean of the rest is below the threshold."""
    kept = list(range(len(squares)))
    while len(kept) > 1 and np.mean(squares[kept]) >= threshold:
        kept.remove(max(kept, key=lambda token: squares[token]))
    return np.isin(np.arange(len(squares)), kept)


MASKED = {
    "estr": {"preset": "estr"},
    "estr with a veto": {"preset": "estr", "veto": 0.3},
    "m2po": {"preset": "m2po"},
    "m2po without flat groups": {"preset": "m2po", "drop_flat_groups": True},
    "icepop": {"preset": "icepop"},
    "capo": {"preset": "capo"},
}


@pytest.mark.parametrize("name", MASKED)
def test_ratios_under_masks_are_those_of_the_kept_tokens(folder, name):
    algorithm = resolve(MASKED[name])
    config = run_config(algorithm=algorithm, minibatches=2, token_budget=300)
    models = exact_models(folder, config, join(), reference=folder)
    episodes = played()
    batch = build_batch(episodes)
    proximal = proximal_of(models.policy.model, batch)
    engine = Listening(models.policy, batch.num_tokens)
    models = msgspec.structs.replace(models, policy=engine)
    result = run_update(episodes, 0, models, config, join())

    current, behaviour = engine.current, batch.behaviour_logprobs.astype(np.float64)
    gap, owner = proximal - behaviour, batch.action_of_token
    kept = result.actions.counted[owner]
    if algorithm.estr_tau is not None:
        kept &= (current - behaviour) ** 2 / (ENTROPY + 1e-6) <= algorithm.estr_tau
    if algorithm.m2_threshold is not None:
        kept &= kept_by_m2(gap**2, algorithm.m2_threshold)
    if name == "icepop":
        kept &= (np.exp(gap) >= algorithm.behaviour_floor) & (np.exp(gap) <= 5.0)
    z = current - proximal
    log_w, centred, lengths, mus = [], [], [], []
    for minibatch in result.minibatches:
        here = np.isin(owner, minibatch.actions) & kept
        mu = z[here].mean()
        mus.append(mu)
        for action in minibatch.actions:
            mine = z[here & (owner == action)]
            vetoed = algorithm.veto and gap[owner == action].min() < np.log(algorithm.veto)
            if not len(mine) or vetoed:
                continue
            centred.append((mine - mu).sum())
            lengths.append(len(mine))
            shape = centred[-1] / len(mine) ** algorithm.alpha
            log_w.append(mu + shape if algorithm.ratio == "calibrated" else mine.mean())

    dropped = batch.num_actions - len(log_w)
    assert (dropped > 0) == (not kept.all()) == (name != "capo")
    found = result.metrics
    if name in ("m2po", "icepop", "capo"):  # masks that are frozen, and all groups count
        assert found["weight/dropped_actions"] == dropped / batch.num_actions
    if algorithm.ratio == "calibrated":
        assert found["policy/mu"] == pytest.approx(np.mean(mus), rel=1e-9)
    assert found["ratio/mu"] == pytest.approx(z[kept].mean(), rel=1e-9)
    assert found["ratio/mu/staleness_0"] == found["ratio/mu"]
    for percent in (1, 50, 99):
        slow = np.percentile(log_w, percent)
        assert found[f"ratio/log_w_p{percent}"] == pytest.approx(slow, rel=1e-9, abs=1e-14)
    slope = variance_slope(np.array(centred), np.array(lengths))
    assert found["ratio/variance_slope"] == pytest.approx(slope, rel=1e-9)
