import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from capo.configs.schema import TinyModelConfig
from capo.learner.tiny_model import MESSAGE_END, build_policy, build_tokenizer

WORDS = ("Put", "apple", "the", "on", "table", ".", ",", "go", "to")
SMALL = TinyModelConfig(
    hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=32
)
DIALOGUE = [
    {"role": "user", "content": "Put the apple on the table."},
    {"role": "assistant", "content": "go to table"},
    {"role": "user", "content": "On the table: apple, cup.\nTwo lines!"},
    {"role": "assistant", "content": ""},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_tokenizer(WORDS, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def policy_folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    build_policy(SMALL, tokenizer, max_length=64, seed=0, folder=folder)
    return folder


@pytest.fixture(scope="module")
def loaded(policy_folder):
    return AutoTokenizer.from_pretrained(policy_folder)


def test_every_known_word_is_one_token_with_and_without_its_space(loaded):
    for word in WORDS:
        assert len(loaded.encode(word)) == 1
        assert len(loaded.encode(f" {word}")) == 1
        assert loaded.encode(word) != loaded.encode(f" {word}")


def test_a_turn_costs_four_tokens_beside_its_words(loaded):
    text = loaded.apply_chat_template(DIALOGUE[:1], tokenize=False, add_generation_prompt=True)
    words = loaded.encode(DIALOGUE[0]["content"])
    assert len(words) == 7
    assert len(loaded.encode(text)) == len(words) + 5


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(
    st.lists(
        st.sampled_from(
            [" apple", "apple", "user\n", "\n", " ", "<|im_start|>", "<|im_end|>", "x", ","]
        )
    )
)
def test_chat_markup_comes_back_exactly(tokenizer, parts):
    text = "".join(parts)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_longer_dialogue_continues_the_text_and_the_tokens_of_a_shorter_one(loaded):
    for end in range(1, len(DIALOGUE), 2):
        prompt = loaded.apply_chat_template(
            DIALOGUE[:end], tokenize=False, add_generation_prompt=True
        )
        whole = loaded.apply_chat_template(DIALOGUE[: end + 1], tokenize=False)
        assert whole == prompt + DIALOGUE[end]["content"] + MESSAGE_END
        tokens = loaded.encode(prompt)
        assert loaded.encode(whole)[: len(tokens)] == tokens


def test_the_message_end_is_the_stop_token(loaded, policy_folder):
    assert loaded.eos_token == MESSAGE_END
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    assert model.generation_config.eos_token_id == loaded.eos_token_id == model.config.eos_token_id
    assert loaded.decode([loaded.eos_token_id], skip_special_tokens=True) == ""


def test_tools_are_refused_instead_of_left_out(loaded):
    tool = {"type": "function", "function": {"name": "go", "parameters": {}}}
    with pytest.raises(Exception, match="no template for tools"):
        loaded.apply_chat_template(DIALOGUE[:1], tools=[tool], tokenize=False)


def test_words_in_any_order_give_the_same_tokenizer(tokenizer, tmp_path):
    again = build_tokenizer([*reversed(WORDS), "apple"], tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()


def test_two_words_in_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'two words' is not a single word"):
        build_tokenizer(["two words"], tmp_path)


def test_the_policy_has_the_configured_shape(policy_folder, loaded):
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    config = model.config
    assert config.model_type == "qwen3"
    assert config.vocab_size == len(loaded)
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (32, 1, 32)
    assert config.max_position_embeddings == 64
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_seed_alone_decides_the_weights(policy_folder, tokenizer, tmp_path):
    state = torch.random.get_rng_state()
    for name, seed in (("same", 0), ("other", 1)):
        build_policy(SMALL, tokenizer, max_length=64, seed=seed, folder=tmp_path / name)
    assert torch.equal(torch.random.get_rng_state(), state)
    first, same, other = (
        (folder / "model.safetensors").read_bytes()
        for folder in (policy_folder, tmp_path / "same", tmp_path / "other")
    )
    assert first == same
    assert first != other
