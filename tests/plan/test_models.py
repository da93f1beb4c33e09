"""Which models the planner knows, and what it says of those that it does not."""

import pytest
from transformers import AutoConfig

from oar_plugin.plan.models import Model, PlanError, load_model

# As the model cards and the checkpoints' indices have them.
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B-Base": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B-Base": 30_532_122_624,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "01-ai/Yi-1.5-34B-Chat-16K": 34_388_917_248,
}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_built_in_models_have_the_published_number_of_parameters(name, parameters):
    assert load_model(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("Qwen/Qwen2.5-7B", 131072),
        ("Qwen/Qwen2.5-7B-Instruct", 32768),
        ("Qwen/Qwen2.5-Math-7B", 4096),
        ("Qwen/Qwen2.5-Math-7B-Instruct", 4096),
        ("meta-llama/Meta-Llama-3-8B-Instruct", 8192),
        ("01-ai/Yi-1.5-34B-Chat", 4096),
        ("01-ai/Yi-1.5-34B-Chat-16K", 16384),
    ],
)
def test_variants_read_as_many_positions_as_they_do(name, positions):
    assert load_model(name).config.max_position_embeddings == positions


def test_a_folder_is_read(tmp_path):
    config = AutoConfig.for_model("llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
    config.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert (model.hidden, model.layers, model.head_dim, model.vocab) == (64, 2, 16, 100)


def test_adapters_are_counted_on_every_linear_layer():
    model = load_model("Qwen/Qwen2.5-7B")  # hidden 3584, MLP 18944, 28 layers, keys of 512
    attention, mlp = 2 * (3584 + 3584) + 2 * (3584 + 512), 3 * (3584 + 18944)
    assert model.adapters == 28 * (attention + mlp)


def test_an_unknown_model_is_named_with_what_to_do(tmp_path):
    with pytest.raises(PlanError, match=r"nobody/Model-7B: .*--model DIR.*Qwen2\.5-7B"):
        load_model("nobody/Model-7B")
    with pytest.raises(PlanError, match="no model that can be planned"):
        load_model(str(tmp_path))
    with pytest.raises(PlanError, match="knows no gpt2; allowed: llama"):
        Model(AutoConfig.for_model("gpt2"))
