import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from capo.actors.chat import Chat
from capo.configs.schema import (
    EnvironmentConfig,
    ModelConfig,
    RunConfig,
    TinyModelConfig,
    WarmStartConfig,
)
from capo.envs.api import Message, Observation
from capo.launch.warm_start import cache_folder, demonstrated_segments, starting_policy
from capo.learner.tiny_model import build_tokenizer
from capo.protocol.errors import ConfigError

CONFIG = RunConfig(
    name="small",
    environment=EnvironmentConfig(
        factory="capo.envs.household:make", options={"train_games": 40, "noise": 0.0}
    ),
    model=ModelConfig(
        tiny=TinyModelConfig(
            hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=32
        ),
        dtype="float32",
        max_length=256,
    ),
    warm_start=WarmStartConfig(demonstrations=60, steps=3, batch_episodes=2, warmup_steps=1),
)


def quiet(_line):
    pass


def changed(**fields):
    return msgspec.structs.replace(CONFIG, **fields)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def built(cache):
    return starting_policy(CONFIG, quiet, cache)


def test_the_folder_has_a_policy_and_its_tokenizer(built):
    tokenizer = AutoTokenizer.from_pretrained(built)
    model = AutoModelForCausalLM.from_pretrained(built)
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.chat_template


def test_the_second_time_it_comes_from_the_cache(cache, built):
    lines = []
    before = (built / "model.safetensors").stat().st_mtime_ns
    assert starting_policy(CONFIG, lines.append, cache) == built
    assert (built / "model.safetensors").stat().st_mtime_ns == before
    assert lines == [f"starting policy: {built} (from the cache)"]


def test_it_is_built_again_bit_for_bit(built, tmp_path):
    again = starting_policy(CONFIG, quiet, tmp_path)
    files = sorted(path.name for path in built.iterdir())
    assert [path.name for path in sorted(again.iterdir())] == files
    for name in files:
        assert (again / name).read_bytes() == (built / name).read_bytes(), name
    assert [path.name for path in tmp_path.iterdir()] == [again.name]


@pytest.mark.parametrize(
    "config",
    [
        changed(seed=1),
        changed(warm_start=None),
        changed(warm_start=msgspec.structs.replace(CONFIG.warm_start, steps=2)),
        changed(
            environment=msgspec.structs.replace(
                CONFIG.environment, options={"train_games": 40, "noise": 0.5}
            )
        ),
    ],
    ids=["seed", "no cloning", "steps", "options"],
)
def test_another_input_gives_another_policy(config, cache, built):
    other = starting_policy(config, quiet, cache)
    assert other != built
    assert (other / "model.safetensors").read_bytes() != (built / "model.safetensors").read_bytes()


def test_what_the_policy_does_not_depend_on_does_not_build_it_again(cache, built):
    assert starting_policy(changed(updates=7, actors=3), quiet, cache) == built


def test_cloning_moved_the_initial_weights(built, cache):
    initial = AutoModelForCausalLM.from_pretrained(
        starting_policy(changed(warm_start=None), quiet, cache)
    )
    cloned = AutoModelForCausalLM.from_pretrained(built)
    for (name, before), after in zip(initial.named_parameters(), cloned.parameters(), strict=True):
        assert not torch.equal(before, after), name


def test_progress_is_reported(tmp_path):
    lines = []
    starting_policy(CONFIG, lines.append, tmp_path)
    assert lines[0] == "warm start: 60 demonstrations"
    assert any(line.startswith("warm start: step 3 of 3, ") for line in lines)


def test_a_pretrained_policy_is_taken_as_it_is(tmp_path):
    config = changed(model=ModelConfig(path="/models/some"), warm_start=None)
    assert str(starting_policy(config, quiet, tmp_path / "cache")) == "/models/some"
    assert not (tmp_path / "cache").exists()


def test_a_failure_leaves_nothing_behind(tmp_path):
    short = changed(model=msgspec.structs.replace(CONFIG.model, max_length=30))
    with pytest.raises(ConfigError, match=r"model.max_length is 30; raise it"):
        starting_policy(short, quiet, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_environment_without_training_tasks_is_refused(tmp_path):
    environment = EnvironmentConfig(factory="capo.envs.household:make", options={"train_games": 0})
    with pytest.raises(ConfigError, match="needs training tasks"):
        starting_policy(changed(environment=environment), quiet, tmp_path)


def test_the_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("CAPO_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("CAPO_CACHE")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(cache_folder()) == "/home/somebody/.cache/capo"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    tokenizer = build_tokenizer(["go", "to", "table"], tmp_path_factory.mktemp("tokenizer"))
    return Chat(tokenizer, max_length=64)


def shown(text, rebuilt=False):
    return Observation(messages=(Message("user", text),), rebuilt=rebuilt)


def test_a_demonstrated_dialogue_is_one_segment_that_trains_what_was_said(chat):
    pairs = [(shown("table"), "go to table"), (shown("to"), "go")]
    (segment,) = demonstrated_segments(pairs, chat, chat.stop_token_ids[0])
    assert chat.decode(segment.token_ids) == (
        "<|im_start|>user\ntable<|im_end|><|im_start|>assistant\ngo to table<|im_end|>"
        "<|im_start|>user\nto<|im_end|><|im_start|>assistant\ngo<|im_end|>"
    )
    said = [chat.decode(segment.token_ids[span.start : span.end]) for span in segment.actions]
    assert said == ["go to table<|im_end|>", "go<|im_end|>"]


def test_a_rebuilt_prompt_starts_a_new_segment(chat):
    pairs = [(shown("table"), "go"), (shown("to", rebuilt=True), "go")]
    segments = demonstrated_segments(pairs, chat, chat.stop_token_ids[0])
    assert len(segments) == 2
    assert chat.decode(segments[1].token_ids) == (
        "<|im_start|>user\nto<|im_end|><|im_start|>assistant\ngo<|im_end|>"
    )
