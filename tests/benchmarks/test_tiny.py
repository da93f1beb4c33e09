"""The small world that tests, demo and studies share: tasks, words, and samples."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.learning.tasks import TASKS as LEARNING
from benchmarks.learning.tasks import OrderedLookup, wrong_results
from benchmarks.tiny.model import build_model, sample
from benchmarks.tiny.tasks import TASKS
from benchmarks.tiny.words import EOS, MARK, NAMES, PAD, VOCABULARY, make_tokenizer, pieces, text
from oar_plugin.credit.answer import Segment
from oar_plugin.passes.tokens import TokenBytes

EVERY_TASK = [*TASKS.values(), *LEARNING.values()]
seeds = st.integers(0, 10**6)


def drawn(task, seed):
    """A problem, and a demonstration without errors."""
    problem = task.problem(rng := random.Random(seed))
    return problem, task.demonstration(problem, rng, 0.0)


@given(task=st.sampled_from(EVERY_TASK), seed=seeds)
def test_perfect_demonstration_is_right(task, seed):
    problem, response = drawn(task, seed)
    reading = task.read(problem, response)
    assert len(problem.prompt) == task.prompt_length
    assert len(response) <= task.max_response_length
    assert (reading.right, reading.length) == (True, len(response))
    assert not task.read(problem, response[:-1]).right, "it does not end"
    assert not task.read(problem, [t for t in response if t != MARK]).right


def planted(task, problem, seed):
    """The last word of each step's results, and whether it is wrong, in the `demonstration` of the same seed."""
    steps, _ = task.solution(problem.content, random.Random(seed), task.error_rate)
    for step in steps:
        if isinstance(task, OrderedLookup):
            name, written = step.results
            yield written, int(written) != problem.content[1][NAMES.index(name)]
        else:
            (*_, a, op, b), (written,) = step.copied, step.results
            yield written, int(written) != (int(a) + int(op + b)) % 10


@given(task=st.sampled_from(EVERY_TASK), seed=seeds)
def test_the_errors_that_were_planted_are_found_and_no_others(task, seed):
    problem = task.problem(random.Random(seed))
    response = task.demonstration(problem, random.Random(seed), task.error_rate)
    reading, steps = task.read(problem, response), list(planted(task, problem, seed))
    assert text([response[at] for at in reading.causal]).split() == [word for word, _ in steps]
    assert (reading.segments[list(reading.causal)] == Segment.REASONING).all()
    wrong = [at for at, (_, is_wrong) in zip(reading.causal, steps, strict=True) if is_wrong]
    assert list(wrong_results(task, problem, response, reading)) == wrong


@given(st.data())
def test_whatever_a_model_writes_is_read(data):
    task = data.draw(st.sampled_from(EVERY_TASK))
    response = data.draw(st.lists(st.sampled_from(range(len(VOCABULARY))), max_size=40))
    problem = task.problem(random.Random(0))
    reading = task.read(problem, response)
    assert set(wrong_results(task, problem, response, reading)) <= set(reading.causal)


@pytest.mark.parametrize(("architecture", "size"), [("llama", None), ("qwen2", 400)])
def test_tokenizer_has_the_ids_of_the_words_wherever_it_is_loaded(tmp_path, architecture, size):
    """AutoTokenizer loads it as Qwen's own class where the model is a Qwen."""
    build_model(0, architecture=architecture, vocab=size or len(VOCABULARY)).save_pretrained(tmp_path)
    make_tokenizer(size).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == architecture
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)
    for task in TASKS.values():
        problem, response = drawn(task, 0)
        messages = [{"role": "user", "content": text(problem.prompt)}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
        assert prompt == list(problem.prompt)
        assert tokenizer(f" {text(response)}<eos>")["input_ids"] == response
        assert TokenBytes(tokenizer).pieces(response) == pieces(response)


@pytest.fixture(scope="module")
def model():
    return build_model(0, hidden=32)


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(0, 40, (3, 11), generator=torch.Generator().manual_seed(0))


def test_most_likely_tokens_are_those_of_the_models_own_generate(model, prompts):
    ours = sample(model, prompts, 2, 12, None)
    theirs = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=12)
    theirs = theirs[:, prompts.shape[1] :].repeat_interleave(2, 0)
    assert torch.equal(ours, theirs[:, : ours.shape[1]])


def test_samples_follow_the_models_distribution_and_the_generator(model, prompts):
    """Second tokens, given the first, from many copies of one prompt."""
    before = torch.get_rng_state()
    tokens, again = (sample(model, prompts[:1], 4000, 2, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(tokens, again)
    assert torch.equal(torch.get_rng_state(), before)
    first = int(tokens[:, 0].mode().values)
    seconds = tokens[tokens[:, 0] == first, 1]
    with torch.no_grad():
        row = model(torch.cat([prompts[0], torch.tensor([first])])[None]).logits[0, -1].softmax(-1)
    share = torch.bincount(seconds, minlength=len(VOCABULARY)) / len(seconds)
    assert (share - row).abs().max() < 5 * (0.25 / len(seconds)) ** 0.5
