import json
import shutil

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from capo.configs.algorithms import AlgorithmConfig, resolve
from capo.learner.results import compare
from capo.learner.tiny_model import build_tokenizer
from capo.learner.trainer import Trainer
from capo.protocol.errors import CheckpointError
from tests.factories import VOCABULARY, batch_of_episodes, run_config, tiny_policy

BATCHES = [batch_of_episodes(6, seed=seed) for seed in range(3)]
CONFIG = run_config(minibatches=2, token_budget=60, updates=3, policy_warmup_steps=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    policy = tiny_policy(tmp_path_factory.mktemp("policy"))
    build_tokenizer(["go", "take"], policy)
    return policy


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A trainer that did three updates, what they gave, and its checkpoint after the first."""
    trainer = Trainer(CONFIG, folder)
    results = [trainer.update(BATCHES[0], 0)]
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    trainer.save(checkpoint)
    results += [trainer.update(BATCHES[version], version) for version in (1, 2)]
    return trainer, results, checkpoint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["grpo", "capo"])
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(tmp_path, folder, dtype, preset):
    config = run_config(algorithm=resolve({"preset": preset}), dtype=dtype)
    trainer = Trainer(config, folder)
    trainer.update(BATCHES[0], 0)
    trainer.save(tmp_path)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert trainer.checkpoint_bytes <= written < 1.3 * trainer.checkpoint_bytes  # and headers


def test_loading_and_going_on_is_bit_identical_to_never_having_stopped(folder, trained):
    trainer, results, checkpoint = trained
    resumed = Trainer(CONFIG, folder)
    resumed.load(checkpoint)
    assert resumed.version == 1
    for version in (1, 2):
        assert compare(results[version], resumed.update(BATCHES[version], version)) == []
    for (name, ours), (_, theirs) in zip(trainer.weights(), resumed.weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_loading_into_a_trainer_that_went_on_takes_it_back(folder, trained):
    _, results, checkpoint = trained
    elsewhere = Trainer(CONFIG, folder)
    elsewhere.update(BATCHES[2], 0)
    elsewhere.load(checkpoint)
    assert compare(results[1], elsewhere.update(BATCHES[1], 1)) == []


def test_two_trainers_of_one_seed_give_the_same_bits(folder, trained):
    _, results, _ = trained
    assert compare(results[0], Trainer(CONFIG, folder).update(BATCHES[0], 0)) == []


def test_a_checkpoint_is_safetensors_and_json_only(trained):
    _, _, checkpoint = trained
    suffixes = {path.suffix for path in checkpoint.rglob("*") if path.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jinja"}
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*.safetensors")}
    assert names == {
        "policy/model.safetensors",
        "critic/model.safetensors",
        "optimizer/policy-rank-0-of-1.safetensors",
        "optimizer/critic-rank-0-of-1.safetensors",
    }


def test_transformers_loads_policy_critic_and_tokenizer_as_they_are(folder, trained, tmp_path):
    trainer, _, _ = trained
    trainer.save(tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    logits = policy(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(trainer.logprobs(tokens), expected, rtol=1e-5, atol=1e-5)
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    assert critic.config.num_labels == 1
    assert critic.score.weight.abs().sum() > 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert tokenizer.encode("go") == AutoTokenizer.from_pretrained(folder).encode("go")
    assert tokenizer.chat_template
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert "capo_varlen" not in json.dumps(config)


def test_an_exported_critic_can_be_where_a_critic_starts(folder, trained, tmp_path):
    trainer, _, _ = trained
    trainer.export(tmp_path)
    config = CONFIG
    model = type(config.model)(
        path="policy", dtype="float32", max_length=512, critic_path=str(tmp_path / "critic")
    )
    warm = Trainer(msgspec.structs.replace(config, model=model), folder)
    fresh = Trainer(config, folder)
    assert np.any(warm.update(BATCHES[0], 0).actions.value != 0.0)
    assert np.all(fresh.update(BATCHES[0], 0).actions.value == 0.0)


def test_weights_have_hugging_face_names_and_tied_ones_come_once(folder, trained):
    trainer, _, _ = trained
    names = [name for name, _ in trainer.weights()]
    assert len(names) == len(set(names))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    assert {name for name, _ in reloaded.named_parameters()} == set(names)
    shapes = dict(reloaded.named_parameters())
    assert all(tensor.shape == shapes[name].shape for name, tensor in trainer.weights())


def test_in_bfloat16_masters_stay_exact_and_exports_are_rounded(folder, tmp_path):
    config = run_config(dtype="bfloat16", minibatches=2, policy_lr=1e-5, critic_lr=1e-5)
    trainer = Trainer(config, folder)
    result = trainer.update(BATCHES[0], 0)
    assert not result.minibatches[0].log_ratio.any()  # z is exactly 0, whatever the dtype
    assert result.minibatches[1].log_ratio.any()
    assert {tensor.dtype for _, tensor in trainer.weights()} == {torch.bfloat16}
    trainer.save(tmp_path)
    stored = json.loads((tmp_path / "policy" / "config.json").read_text())
    assert stored["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    resumed = Trainer(config, folder)
    resumed.load(tmp_path)
    assert compare(trainer.update(BATCHES[1], 1), resumed.update(BATCHES[1], 1)) == []


def test_the_reference_stays_where_the_policy_started(folder, trained):
    _, results, _ = trained
    assert not results[0].minibatches[0].log_ratio.any()
    assert results[0].minibatches[0].kl == 0.0
    assert results[2].minibatches[0].kl > 0.0


def test_an_update_of_another_version_is_refused(folder):
    trainer = Trainer(CONFIG, folder)
    with pytest.raises(ValueError, match="update of version 4, but the weights are 0"):
        trainer.update(BATCHES[0], 4)


def test_log_probs_need_something_to_predict(trained):
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        trained[0].logprobs([3])


def test_a_checkpoint_of_another_run_is_refused(folder, trained, tmp_path):
    _, _, checkpoint = trained
    other = tiny_policy(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="reference_digest="):
        Trainer(CONFIG, other).load(checkpoint)
    without = run_config(algorithm=AlgorithmConfig(credit="group", ratio="token"))
    with pytest.raises(CheckpointError, match="has_critic=True, but this run has False"):
        Trainer(without, folder).load(checkpoint)


def test_a_torn_checkpoint_is_refused(folder, trained, tmp_path):
    _, _, checkpoint = trained
    trainer = Trainer(CONFIG, folder)
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        trainer.load(tmp_path / "missing")
    torn = shutil.copytree(checkpoint, tmp_path / "torn")
    state = torn / "optimizer" / "policy-rank-0-of-1.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        trainer.load(torn)
    state.unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        trainer.load(torn)
    assert trainer.version == 0


def test_an_untied_head_is_trained_and_exported(tmp_path):
    untied = tiny_policy(tmp_path / "policy", tied=False)
    trainer = Trainer(CONFIG, untied)
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    trainer.update(BATCHES[0], 0)
    after = dict(trainer.weights())
    assert before["lm_head.weight"].shape == (VOCABULARY, 16)
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
