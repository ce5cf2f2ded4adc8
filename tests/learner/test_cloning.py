import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from capo.configs.schema import TinyModelConfig, WarmStartConfig
from capo.learner.cloning import clone, epochs, lr_factor
from capo.learner.segments import ActionSpan, Segment
from capo.learner.tiny_model import build_policy, build_tokenizer

CONFIG = WarmStartConfig(demonstrations=12, steps=120, batch_episodes=4, lr=1e-2, warmup_steps=5)


def demonstration(*turns):
    """One segment of alternating context and action tokens."""
    tokens, spans = [], []
    for step, (context, action) in enumerate(turns):
        tokens += context
        spans.append(ActionSpan(step, len(tokens), len(tokens) + len(action)))
        tokens += action
    return Segment(np.array(tokens, dtype=np.int32), tuple(spans))


# The action repeats the context's only word; the second turn answers with the stop token alone.
WORDS = range(10, 22)
DEMONSTRATIONS = [demonstration(([1, 5, word], [word, 2]), ([6], [2])) for word in WORDS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    config = TinyModelConfig(
        hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=32
    )
    build_policy(config, build_tokenizer(["word"], folder), max_length=32, seed=0, folder=folder)
    return folder


def run(folder, output, config=CONFIG, seed=0, demonstrations=DEMONSTRATIONS):
    losses = []
    clone(
        folder,
        demonstrations,
        config,
        seed=seed,
        output=output,
        progress=lambda _step, loss: losses.append(loss),
    )
    return losses


def action_loss(folder, demonstrations):
    """Mean negative log-prob over the action tokens, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    with torch.no_grad():
        for one in demonstrations:
            tokens = torch.from_numpy(one.token_ids.astype(np.int64))
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)
            for span in one.actions:
                for position in range(span.start, span.end):
                    losses.append(-float(logprobs[position - 1, tokens[position]]))
    return sum(losses) / len(losses)


def test_what_was_shown_is_learned_in_the_configured_number_of_steps(folder, tmp_path):
    losses = run(folder, tmp_path)
    assert len(losses) == CONFIG.steps
    assert action_loss(folder, DEMONSTRATIONS) > 5.0
    assert action_loss(tmp_path, DEMONSTRATIONS) < 0.2


def test_the_loss_is_the_mean_over_action_tokens_alone(folder, tmp_path):
    config = WarmStartConfig(steps=1, batch_episodes=len(DEMONSTRATIONS))
    (loss,) = run(folder, tmp_path, config)
    assert loss == pytest.approx(action_loss(folder, DEMONSTRATIONS), rel=1e-5)


def test_every_parameter_is_trained(folder, tmp_path):
    run(folder, tmp_path, WarmStartConfig(steps=1, batch_episodes=len(DEMONSTRATIONS)))
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path))
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        assert not torch.equal(old, new), name


def test_the_same_seed_gives_the_same_weights(folder, tmp_path):
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        run(folder, tmp_path / name, seed=seed)
    one, two, three = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "three")
    )
    assert one == two
    assert one != three


def test_the_result_is_a_folder_like_the_one_it_started_from(folder, tmp_path):
    run(folder, tmp_path, WarmStartConfig(steps=1))
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes()
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path))
    assert after.state_dict().keys() == before.state_dict().keys()


def test_demonstrations_without_actions_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="none of the 1 demonstrations has an action"):
        run(folder, tmp_path, demonstrations=[Segment(np.ones(3, dtype=np.int32), ())])


def test_every_demonstration_comes_once_an_epoch():
    batches = list(itertools.islice(epochs(count=10, batch=4, seed=0), 10))
    order = [index for batch in batches for index in batch]
    for epoch in range(4):
        assert sorted(order[epoch * 10 : epoch * 10 + 10]) == list(range(10))
    assert order[:10] != order[10:20]


def test_an_epoch_smaller_than_a_batch_is_repeated_within_it():
    (batch,) = itertools.islice(epochs(count=3, batch=6, seed=0), 1)
    assert sorted(batch) == [0, 0, 1, 1, 2, 2]


def test_the_learning_rate_goes_up_and_then_down_to_its_final_factor():
    config = WarmStartConfig(steps=100, warmup_steps=10, final_lr_factor=0.1)
    factors = [lr_factor(step, config) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert factors[10] == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(0.1)
    assert factors[10:] == sorted(factors[10:], reverse=True)
