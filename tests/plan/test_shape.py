"""Parameter counts of known models, and of models built from a config."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from oar_plugin.plan.shape import ShapeError, known_models, load_shape, shape_of

# As the model cards and the checkpoints' indices have them.
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "01-ai/Yi-1.5-34B-Chat-16K": 34_388_917_248,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-30B-A3B-Base": 30_532_122_624,
}


@pytest.mark.parametrize(("model", "parameters"), PARAMETERS.items())
def test_bundled_shapes_have_the_published_number_of_parameters(model, parameters):
    assert model in known_models()
    assert load_shape(model).parameters == parameters


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "llama", "tie_word_embeddings": False, "head_dim": 24},
        {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 32},
        {
            "model_type": "qwen3_moe",
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
        },
    ],
    ids=lambda values: values["model_type"],
)
def test_a_shape_counts_the_parameters_of_the_model_that_its_config_builds(values):
    config = AutoConfig.for_model(
        **values,
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape_of(config).parameters == sum(p.numel() for p in model.parameters())


def test_a_folder_with_a_config_is_read(tmp_path):
    config = AutoConfig.for_model("llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
    config.save_pretrained(tmp_path)
    shape = load_shape(str(tmp_path))
    assert (shape.hidden, shape.layers, shape.head_dim, shape.vocab) == (64, 2, 16, 100)


def test_math_models_read_fewer_positions():
    assert load_shape("Qwen/Qwen2.5-Math-7B").max_positions == 4096
    assert load_shape("Qwen/Qwen2.5-7B-Instruct").max_positions == 32768


def test_an_unknown_size_names_the_ones_there_are():
    with pytest.raises(ShapeError, match="bench:1m"):
        load_shape("bench:2t")


def test_adapters_are_counted_on_every_linear_layer():
    shape = load_shape("bench:tiny")  # hidden 64, MLP 128, 2 layers, 4 heads of 16, 2 of them keys
    per_layer = (64 + 64) + 2 * (64 + 32) + (64 + 64) + 2 * (64 + 128) + (128 + 64)
    assert shape.lora_parameters(8) == 2 * 8 * per_layer
