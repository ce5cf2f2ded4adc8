"""The size of a model by its config.json, against the model that transformers builds from it."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from capo.launch.decoder_shape import read_shape
from capo.protocol.errors import ConfigError

LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": None, "head_dim": None},
        {"head_dim": 16, "tie_word_embeddings": True},
    ],
)
def test_parameters_and_cache_are_those_of_the_model(tmp_path, more):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | more))
    shape = read_shape(tmp_path)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA | more))
    assert shape.num_parameters == sum(one.numel() for one in model.parameters())
    keys = model.model.layers[0].self_attn.k_proj.out_features
    assert shape.kv_values_per_token == 3 * 2 * keys


def test_a_folder_without_a_description_has_no_shape(tmp_path):
    assert read_shape(tmp_path) is None


@pytest.mark.parametrize("text", ["{}", "[", json.dumps(LLAMA | {"num_attention_heads": 0})])
def test_what_describes_no_decoder_is_refused_by_name(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is not a decoder's"):
        read_shape(tmp_path)
