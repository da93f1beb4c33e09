"""The demo's tokenizer and model: what verl and vLLM will load."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from recipes.cpu_demo import task, warm_start  # noqa: E402
from recipes.cpu_demo.tokenizer import build_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.mark.parametrize("symbol", [*task.WORDS, *"0123456789", *"+-=;?", task.MARKER])
def test_every_symbol_of_the_task_is_one_token(tokenizer, symbol):
    assert len(tokenizer(" " + symbol)["input_ids"]) == 1


def test_a_response_has_as_many_tokens_as_words(tokenizer):
    _, text = next(task.Tutor().demonstrations(0))
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.split())
    assert tokenizer.decode(ids) == text


def test_any_other_text_survives_too(tokenizer):
    text = "Übung:\n  naïve \U0001f600 {}"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_prompt_and_response_fit_into_what_the_run_allows(tokenizer):
    from recipes.cpu_demo.training import MAX_PROMPT_TOKENS

    tutor = task.Tutor()
    for problem, text in zip(task.problems(3, 50), (text for _, text in tutor.demonstrations(4)), strict=False):
        assert len(tokenizer(warm_start.chat_prompt(tokenizer, problem))["input_ids"]) <= MAX_PROMPT_TOKENS
        assert len(tokenizer(text)["input_ids"]) < warm_start.MAX_NEW_TOKENS


def test_the_chat_template_opens_the_assistants_turn(tokenizer):
    prompt = warm_start.chat_prompt(tokenizer, task.problems(0, 1)[0])
    assert prompt.startswith("<|im_start|>user\n")
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_the_vocabulary_is_the_same_in_another_process(tokenizer):
    code = (
        "from recipes.cpu_demo.tokenizer import build_tokenizer; print(sorted(build_tokenizer().get_vocab().items()))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == str(sorted(tokenizer.get_vocab().items()))


def test_auto_classes_load_what_was_saved(tokenizer, tmp_path):
    model = warm_start.build_model(tokenizer, seed=3)
    warm_start.save(model, tokenizer, tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = warm_start.chat_prompt(tokenizer, task.problems(0, 1)[0]) + "so 3 + 4 = 7 ; #### 7"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.chat_template == tokenizer.chat_template
    assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.eos_token_id == tokenizer.eos_token_id
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_the_same_seed_gives_the_same_model(tokenizer):
    first, second = (warm_start.warm_start(tokenizer, 7, fact_steps=3, longest=1, cool_down=1) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_responses_and_results_are_learned(tokenizer):
    tutor = task.Tutor()
    ids, labels = next(warm_start.response_batches(tokenizer, tutor, 0))
    prompt = len(tokenizer(warm_start.chat_prompt(tokenizer, task.problems(0, 1)[0]))["input_ids"])
    assert (labels[:, :prompt] == -100).all()
    assert tokenizer.decode(labels[0][labels[0] != -100]).endswith("<|im_end|>")
    ids, labels = next(warm_start.fact_batches(tokenizer, tutor, 0))
    learned = tokenizer.convert_ids_to_tokens(labels[labels != -100].tolist())
    assert set(learned) <= {f"Ġ{digit}" for digit in range(10)}
    assert (ids[labels != -100] == labels[labels != -100]).all()


def test_sampling_leaves_the_global_generator_alone(tokenizer):
    model = warm_start.build_model(tokenizer, seed=0).eval()
    before = torch.get_rng_state()
    texts = warm_start.respond(model, tokenizer, task.problems(0, 2), greedy=False, seed=1)
    assert len(texts) == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert texts == warm_start.respond(model, tokenizer, task.problems(0, 2), greedy=False, seed=1)
