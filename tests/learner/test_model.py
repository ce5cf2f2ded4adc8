import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

import capo.learner.model as model_module
from capo.learner.batch import build_batch
from capo.learner.microbatch import collate
from capo.learner.model import PolicyModel, Precision, load_critic, load_policy
from capo.protocol.errors import ConfigError
from capo.protocol.records import EpisodeStatus
from tests.factories import VOCABULARY, batch_of_episodes, cut_apart, random_episode, tiny_policy

CPU = torch.device("cpu")
FP64 = Precision(torch.float64, torch.float64)
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def placed():
    batch = build_batch(batch_of_episodes(8))
    return [one for segments in batch.segments for one in segments]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_log_probs_are_those_of_a_plain_forward_pass_of_the_same_weights(folder, placed):
    model = load_policy(folder, Precision(), CPU)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scored, _ = model(collate(placed, CPU), TEMPERATURE)
    expected = []
    for one in placed:
        ids = torch.from_numpy(one.segment.token_ids).long()
        logprobs = (plain(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        for span in one.segment.actions:
            for position in range(span.start, span.end):
                expected.append(logprobs[position - 1, ids[position]])
    close(scored, torch.stack(expected))


def test_packed_is_one_by_one_in_log_probs_loss_and_gradient(folder, placed):
    model = load_policy(folder, Precision(), CPU)
    packed, _ = model(collate(placed, CPU), TEMPERATURE)
    together = gradients(model, packed.square().sum())
    alone = [model(collate([one], CPU), TEMPERATURE)[0] for one in placed]
    close(packed, torch.cat(alone))
    separately = gradients(model, sum(one.square().sum() for one in alone))
    assert separately.keys() == together.keys()
    for name, gradient in together.items():
        close(gradient, separately[name])


def test_a_large_vocabulary_is_scored_in_parts_with_the_same_gradient(folder, placed, monkeypatch):
    model = load_policy(folder, FP64, CPU)
    whole, entropy = model(collate(placed, CPU), TEMPERATURE, True)
    expected = gradients(model, whole.square().sum())
    monkeypatch.setattr(model_module, "MAX_LOGITS", 5 * VOCABULARY)
    parts, entropy_of_parts = model(collate(placed, CPU), TEMPERATURE, True)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy_of_parts, entropy, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients(model, parts.square().sum()).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(model(collate(placed, CPU), TEMPERATURE)[0], parts)


def test_entropy_is_that_of_the_tempered_distribution(folder, placed):
    model = load_policy(folder, Precision(), CPU)
    microbatch = collate(placed[:1], CPU)
    _, entropy = model(microbatch, TEMPERATURE, True)
    logits = model.causal_lm(
        microbatch.token_ids[None],
        cu_seq_lens_q=microbatch.cu_seqlens,
        position_ids=microbatch.position_ids[None],
    ).logits[0, microbatch.predictors]
    expected = torch.distributions.Categorical(logits=logits / TEMPERATURE).entropy()
    close(entropy, expected)
    assert not entropy.requires_grad


@pytest.mark.parametrize("load", [load_policy, load_critic])
def test_recomputing_layers_changes_no_gradient(folder, placed, load):
    microbatch = collate(placed, CPU)
    results = []
    for checkpoint_layers in (False, True):
        model = load(folder, FP64, CPU, checkpoint_layers=checkpoint_layers)
        if load is load_policy:
            out, _ = model(microbatch, 1.0)
        else:
            torch.nn.init.ones_(model.classifier.score.weight)
            out = model(microbatch, microbatch.boundaries)
        results.append(gradients(model, out.square().sum()))
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, results[1][name], rtol=1e-9, atol=1e-12)


def test_bfloat16_computes_in_bfloat16_on_float32_weights(folder, placed):
    exact, _ = load_policy(folder, Precision(), CPU)(collate(placed, CPU), 1.0)
    model = load_policy(folder, Precision(torch.float32, torch.bfloat16), CPU)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    scored, _ = model(collate(placed, CPU), 1.0)
    assert scored.dtype == torch.float32
    assert 0 < (scored - exact).abs().max() < 0.3
    assert {g.dtype for g in gradients(model, scored.sum()).values()} == {torch.float32}


def test_values_start_at_zero_and_the_head_learns_first(folder, placed):
    critic = load_critic(folder, Precision(), CPU)
    microbatch = collate(placed, CPU)
    values = critic(microbatch, microbatch.boundaries)
    assert values.shape == microbatch.boundaries.shape
    assert torch.equal(values, torch.zeros_like(values))
    grads = gradients(critic, (values - 1).square().sum())
    assert grads["classifier.score.weight"].abs().sum() > 0


def test_merged_steps_have_the_values_of_separate_ones(folder):
    critic = load_critic(folder, Precision(), CPU)
    torch.nn.init.normal_(critic.classifier.score.weight)
    merged = random_episode(3, num_steps=5, rebuilt=0.0, status=EpisodeStatus.TRUNCATED)
    apart = random_episode(3, num_steps=5, rebuilt=0.0, status=EpisodeStatus.TRUNCATED)
    apart = cut_apart(apart)
    read = []
    for played in (merged, apart):
        batch = build_batch([played])
        packed = collate([one.placed for one in batch.value_segments], CPU)
        assert batch.value_segments[-1].bootstrap_of == 0
        read.append(critic(packed, torch.cat([packed.boundaries, packed.last_tokens[-1:]])))
    assert len(build_batch([merged]).value_segments) == 1
    assert len(build_batch([apart]).value_segments) == 6
    close(*read)


def test_a_model_that_transforms_its_logits_is_refused(folder):
    lm = Qwen3ForCausalLM.from_pretrained(folder)
    lm.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="final_logit_softcapping=30"):
        PolicyModel(lm, Precision())


def test_no_random_draw_is_left(folder, placed):
    lm = Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="capo_varlen")
    for layer in lm.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model = PolicyModel(copy.deepcopy(lm), Precision())
    first, _ = model(collate(placed, CPU), 1.0)
    second, _ = model(collate(placed, CPU), 1.0)
    assert model.causal_lm.training
    assert torch.equal(first, second)
