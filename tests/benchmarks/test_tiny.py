"""The small world that tests, demo and studies share."""

import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.learning.tasks import TASKS as LEARNING_TASKS
from benchmarks.tiny.data import compute_score, write_problems
from benchmarks.tiny.model import build_model, sample
from benchmarks.tiny.tasks import TASKS, Parallel
from benchmarks.tiny.warm_start import WarmStart, batches, train
from benchmarks.tiny.words import EOS, MARK, PAD, VOCABULARY, make_tokenizer, pieces, text
from oar_plugin.credit.answer import Segment
from oar_plugin.passes.tokens import TokenBytes

EVERY_TASK = [*TASKS.values(), *LEARNING_TASKS.values()]
names = st.sampled_from(sorted(TASKS))
seeds = st.integers(0, 10**6)


def drawn(task, seed, error_rate=0.0):
    rng = random.Random(seed)
    problem = task.problem(rng)
    return problem, task.demonstration(problem, rng, error_rate)


@given(task=st.sampled_from(EVERY_TASK), seed=seeds)
def test_perfect_demonstration_is_right(task, seed):
    problem, response = drawn(task, seed)
    reading = task.read(problem, response)
    assert len(problem.prompt) == task.prompt_length
    assert len(response) <= task.max_response_length
    assert reading.right
    assert reading.ended
    assert reading.length == len(response)


@given(name=names, seed=seeds)
def test_results_are_found_in_the_reasoning(name, seed):
    task = TASKS[name]
    problem, response = drawn(task, seed, task.error_rate)
    reading, rng = task.read(problem, response), random.Random(seed)
    steps, _ = task.solution(task.problem(rng).content, rng, task.error_rate)
    assert text([response[at] for at in reading.causal]).split() == [word for step in steps for word in step.results]
    assert (reading.segments[list(reading.causal)] == Segment.REASONING).all()


@given(name=names, seed=seeds)
def test_answer_is_wrong_where_the_results_it_follows_from_are(name, seed):
    task, rng = TASKS[name], random.Random(seed)
    problem = task.problem(rng)
    steps, answer = task.solution(problem.content, rng, 0.5)
    right_steps, right_answer = task.solution(problem.content, rng, 0.0)
    followed = slice(None) if name.startswith("parallel") else slice(-1, None)  # a later error may undo an earlier one
    pairs = zip(steps[followed], right_steps[followed], strict=True)
    assert (answer != right_answer) == any(ours.results != right.results for ours, right in pairs)


@pytest.mark.parametrize("task", EVERY_TASK, ids=lambda task: task.name)
def test_error_rate_leaves_as_many_right_as_it_should(task):
    wanted = 0.2 if task.name == "parallel_2_rare" else 0.4
    right = (task.read(*drawn(task, seed, task.error_rate)).right for seed in range(400))
    assert abs(sum(right) / 400 - wanted) < 0.1


def test_errors_propagate_in_a_chain():
    task, rng = TASKS["chain"], random.Random(0)
    steps, _ = task.solution(task.problem(rng).content, rng, 1.0)
    assert [step.copied[0] for step in steps[1:]] == [step.results[0] for step in steps[:-1]]


def test_response_that_never_ends_is_not_right():
    task = TASKS["parallel"]
    problem, response = drawn(task, 0)
    assert not task.read(problem, response[:-1]).right
    assert task.read(problem, [*response, EOS, EOS]).length == len(response)
    assert not task.read(problem, [t for t in response if t != MARK]).right


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("size", [None, 400])
def test_tokenizer_has_the_ids_of_the_words_wherever_it_is_loaded(tmp_path, architecture, size):
    """AutoTokenizer loads it as Qwen's own class where the model is a Qwen."""
    model = build_model(0, architecture=architecture, vocab=size or len(VOCABULARY))
    model.save_pretrained(tmp_path)
    make_tokenizer(size).save_pretrained(tmp_path)
    tokenizer, loaded = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)
    for name in TASKS:
        problem, response = drawn(TASKS[name], 0)
        messages = [{"role": "user", "content": text(problem.prompt)}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
        assert prompt == list(problem.prompt)
        assert tokenizer(f" {text(response)}<eos>")["input_ids"] == response
        assert TokenBytes(tokenizer).pieces(response) == pieces(response)
        assert tokenizer.decode(response, skip_special_tokens=True).strip() == text(response)
    ids = torch.tensor([response])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("by_bytes", [True, False])
def test_any_text_survives_a_tokenizer_with_bytes(by_bytes):
    tokenizer = make_tokenizer(400, by_bytes=by_bytes)
    words = "Übung:\n  naïve so 34 lets \U0001f600 {}"
    ids = tokenizer(words)["input_ids"]
    assert tokenizer.decode(ids) == words
    assert len(tokenizer) == 400
    assert (len(ids) == len(words.encode())) == by_bytes
    with pytest.raises(ValueError, match="at least 304"):
        make_tokenizer(100)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("so 3 + 4 = 7 ; #### 7 7 4 6", 1.0),
        ("#### 1 1 1 1 then #### 7 7 4 6\nand more", 1.0),
        ("####   7  7 4 6  <eos>", 1.0),
        ("#### 7 7 4 5", 0.0),
        ("7 7 4 6", 0.0),
        ("####", 0.0),
    ],
)
def test_reward_looks_behind_the_last_marker_on_its_line(response, score):
    assert compute_score("tiny", response, "7 7 4 6", extra_info={}, anything=1) == {"score": score, "acc": score}


def test_reward_needs_no_heavy_import():
    code = "import sys, benchmarks.tiny.data; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_verl_gets_the_columns_it_reads(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    problem, response = drawn(TASKS["chain"], 1)
    write_problems(tmp_path / "file", [problem])
    (row,) = pq.read_table(tmp_path / "file").to_pylist()
    assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert row["prompt"] == [{"role": "user", "content": text(problem.prompt)}]
    assert compute_score("", text(response), row["reward_model"]["ground_truth"])["score"] == 1


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


def test_samples_follow_the_models_distribution(model, prompts):
    """Second tokens, given the first, from many copies of one prompt."""
    tokens = sample(model, prompts[:1], 4000, 2, torch.Generator().manual_seed(1))
    first = int(tokens[:, 0].mode().values)
    seconds = tokens[tokens[:, 0] == first, 1]
    with torch.no_grad():
        row = model(torch.cat([prompts[0], torch.tensor([first])])[None]).logits[0, -1].softmax(-1)
    share = torch.bincount(seconds, minlength=len(VOCABULARY)) / len(seconds)
    assert (share - row).abs().max() < 5 * (0.25 / len(seconds)) ** 0.5


def test_noise_is_shared_by_policies_that_agree_and_by_nobody_else(model, prompts):
    before = torch.get_rng_state()
    again = [sample(build_model(0, hidden=32), prompts, 4, 10, torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*again)
    assert not torch.equal(again[0], sample(model, prompts, 4, 10, torch.Generator().manual_seed(8)))
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_but_padding_follows_the_end(model, prompts):
    tokens = sample(model, prompts, 50, 40, torch.Generator().manual_seed(0))
    behind = (tokens == EOS).cumsum(1).roll(1, 1)
    behind[:, 0] = 0
    assert behind.any()
    assert (tokens[behind > 0] == PAD).all()


def test_labels_are_the_response():
    task = TASKS["chain"]
    token_BL, label_BL = next(batches(task, 4, 0, None))
    assert (label_BL[:, : task.prompt_length] == PAD).all()
    labelled = label_BL != PAD
    assert torch.equal(label_BL[labelled], token_BL[labelled])
    assert (label_BL == EOS).sum() == 4


def test_imitation_learns():
    easy, model = Parallel("easy", steps=1, filler=(0, 0), error_rate=0.0), build_model(0, hidden=32)
    losses = []
    settings = WarmStart(short_steps=40, full_steps=0, batch=8)
    train(model, easy, 0, settings, lambda what, *_: losses.append(float(what.split()[-1])))
    assert losses[-1] < losses[0] / 2
