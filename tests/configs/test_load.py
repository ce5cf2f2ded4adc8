"""A configuration is resolved, or refused with one sentence that names the key and the remedy."""

from pathlib import Path

import pytest

from capo.configs import validate
from capo.configs.load import InvalidConfigError, find, from_json, load, to_json
from capo.configs.toml import toml_lines

MINIMAL = """
name = "minimal"
[environment]
factory = "capo.envs.household:HouseholdFactory"
[model]
path = "somewhere"
"""
PACKAGED = sorted(file.stem for file in (Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    file = tmp_path / "minimal.toml"
    file.write_text(MINIMAL)
    return file


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(InvalidConfigError) as error:
        load(file, overrides)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", PACKAGED)
def test_every_packaged_configuration_is_valid(name: str) -> None:
    assert load(name).name


def test_defaults_are_the_papers(minimal: Path) -> None:
    config = load(minimal)
    assert (config.algorithm.gamma, config.algorithm.lam) == (0.99, 1.0)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (1e-3, 1e-3)
    assert (config.learner.policy_lr, config.learner.critic_lr) == (1e-6, 1e-5)
    assert config.learner.batch_episodes == 128
    assert config.learner.minibatches >= 4


def test_overrides_are_toml_values_and_bare_words_are_strings(minimal: Path) -> None:
    config = load(minimal, ["learner.policy_lr=2e-5", "name=other", "evaluation.before=false"])
    assert config.learner.policy_lr == 2e-5
    assert config.name == "other"
    assert config.evaluation.before is False


def test_a_typo_is_refused_with_the_nearest_name(minimal: Path) -> None:
    assert "'learner.token_budget'" in refusal(minimal, "learner.token_bugdet=1").replace(
        "did you mean 'token_budget'", "did you mean 'learner.token_budget'"
    )
    assert "'algorithm.gama'" in refusal(minimal, "algorithm.gama=0.9")
    assert "did you mean 'scheduler'" in refusal(minimal, "schedular.max_staleness=1")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.token_budget=-5", ["learner.token_budget", "positive", "-5"]),
        ("learner.token_budget=100", ["100", "model.max_length", "8192"]),
        ("learner.batch_episodes=10", ["10", "4 minibatches"]),
        ("scheduler.group_size=3", ["128", "groups of 3"]),
        ("rollout.temperature=3.0", ["3.0", "vLLM"]),
        ("rollout.temperature=0", ["rollout.temperature", "positive"]),
        ("rollout.max_action_tokens=9000", ["9000", "no room"]),
        ("network.dead_after_s=1", ["network.dead_after_s", "heartbeats"]),
        ("learner.minibatches=two", ["learner.minibatches", "expected int", "str"]),
        ("model.dtype=float64", ["model.dtype", "float64"]),
        ("model.tiny.hidden_size=64", ["exactly one", "model.path"]),
        ("environment.factory=nowhere", ["module:name", "nowhere"]),
        ("scheduler.max_error_fraction=1.5", ["(0, 1]", "1.5"]),
        ("rollout.on_overlong=drop", ["rollout.on_overlong", "'drop'", "drop_oldest"]),
        ("algorithm.ratio=sequnce", ["algorithm.ratio", "sequnce", "sequence"]),
        ("network.bind=tcp://localhost:99999", ["network.bind", "65535"]),
        ("network.bind=nowhere", ["network.bind", "tcp://HOST:PORT"]),
        ("evaluation.modes=[]", ["evaluation.modes", "sampled"]),
        ("algorithm.clip=-1", ["clip_low", "-1"]),
        ("learner.policy_lr=nan", ["learner.policy_lr", "positive", "nan"]),
        ("name.inner=1", ["name", "not a table"]),
        ("nonsense", ["KEY=VALUE", "nonsense"]),
    ],
)
def test_impossible_values_are_refused_in_one_sentence(
    minimal: Path, override: str, words: list[str]
) -> None:
    text = refusal(minimal, override)
    for word in words:
        assert word in text


def test_a_missing_file_lists_the_packaged_names() -> None:
    with pytest.raises(InvalidConfigError, match="quickstart"):
        find("no_such_run.toml")


def test_broken_toml_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("name = \n")
    assert "line 1" in refusal(file)


def test_algorithm_can_be_one_word(minimal: Path) -> None:
    assert load(minimal, ["algorithm=capo"]) == load(minimal)
    assert "capo" in refusal(minimal, "algorithm=cappo")


def test_a_resolved_configuration_survives_the_run_file(minimal: Path) -> None:
    config = load(minimal, ["algorithm.clip=0.01"])
    assert config.algorithm.clip_low == config.algorithm.clip_high == 0.01
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize("name", PACKAGED)
def test_a_configuration_written_out_is_read_back_as_the_same(name: str, tmp_path: Path) -> None:
    config = load(name)
    file = tmp_path / "written.toml"
    file.write_text("\n".join(toml_lines(config)))
    assert load(file) == config


def test_a_group_method_brings_its_group_size(minimal: Path) -> None:
    assert load(minimal).scheduler.group_size == 1
    assert load(minimal, ["algorithm=grpo"]).scheduler.group_size == 8
    assert "at least 2" in refusal(minimal, "algorithm=grpo", "scheduler.group_size=1")


def test_a_method_that_drops_flat_groups_has_them_replaced(minimal: Path) -> None:
    assert load(minimal, ["algorithm=grpo"]).scheduler.max_flat_batches == 0
    assert load(minimal, ["algorithm=dapo"]).scheduler.max_flat_batches == 10
    chosen = load(minimal, ["algorithm=dapo", "scheduler.max_flat_batches=2"])
    assert chosen.scheduler.max_flat_batches == 2
    assert "action_gae" in refusal(minimal, "scheduler.max_flat_batches=3")
    gigpo = ["algorithm=gigpo", "algorithm.drop_flat_groups=true"]  # compares states as well
    assert load(minimal, gigpo).scheduler.max_flat_batches == 0
    recorded = to_json(chosen).replace(b'"max_flat_batches":2,', b"")  # of an older version
    assert from_json(recorded).scheduler.max_flat_batches == 0
    assert "must not be negative" in refusal(minimal, "scheduler.max_flat_batches=-2")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_heads", 3, ["num_heads 3", "num_kv_heads 2"]),
        ("hidden_size", 0, ["hidden_size", "positive"]),
        ("num_layers", -1, ["num_layers", "positive"]),
    ],
)
def test_a_tiny_model_that_cannot_compute_is_refused(key: str, value: int, words) -> None:
    with pytest.raises(InvalidConfigError) as error:
        load("quickstart", [f"model.tiny.{key}={value}"])
    for word in words:
        assert word in str(error.value)


def test_clip_overrides_both_sides_whatever_the_file_says() -> None:
    config = load("quickstart", ["algorithm.clip=0.2"])
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.2)


def test_a_byte_order_mark_and_a_folder(minimal: Path) -> None:
    minimal.write_bytes(b"\xef\xbb\xbf" + minimal.read_bytes())
    assert load(minimal).name == "minimal"
    assert "folder" in refusal(minimal.parent)


@pytest.mark.parametrize("name", sorted(set(validate._POSITIVE.split())))
@pytest.mark.parametrize("value", ["0", "-1"])
def test_what_must_be_positive_is_told_by_name(minimal: Path, name: str, value: str) -> None:
    if (name, value) == ("scheduler.group_size", "0"):  # the method decides
        assert load(minimal, [f"{name}={value}"]).scheduler.group_size == 1
    else:
        assert f"{name} must be positive, got {value}" in refusal(minimal, f"{name}={value}")
