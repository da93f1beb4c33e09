"""Prompts that show an answer: what they are made of, and when there is none; and what a plain model says after them."""

import numpy as np
import pytest
import torch

import oar_plugin
from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status, summarize
from oar_plugin.credit.importance import IMPORTANCES
from oar_plugin.passes.contexts import NOTHING, ContextPrompts, PromptSource
from oar_plugin.token_credit import TokenCredit
from tests.hosts.engine import world

TOKENIZER = world.make_tokenizer()
TOKENIZER.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{{ end }}>"
CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4?"}]
PLAIN = "[system]Add.[user]3+4?!>"
BY_SIGN = [name for name, one in IMPORTANCES.items() if one.contexts]


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def asked(prompt=CHAT, text=PLAIN, response="3+4 is 8 #### 8<eos>", truth="7", sign=-1):
    response_L = torch.tensor(ids(response))
    return PromptSource(prompt, torch.tensor(ids(text)), response_L, torch.ones_like(response_L).bool(), truth, sign)


def shown(*rows, importance="contrast_own", **settings):
    """The texts of the prompts that show the right answers, and those that show the responses' own."""
    config = OarConfig(importance=importance, answer_patterns=("hash",), max_answer_tokens=4, context=settings)
    made = ContextPrompts(config, TOKENIZER, 100, {"end": "!"}).contexts(rows).prompts
    return {name: [None if prompt is None else TOKENIZER.decode(prompt) for prompt in prompts]
            for name, prompts in made.items()}  # fmt: skip


def test_the_hosts_own_prompt_with_the_answer_in_the_users_last_message():
    showing = "[system]Add.[user]The right answer is {}. 3+4?!>"
    assert shown(asked()) == {"truth": [showing.format(7)], "own": [showing.format(8)]}
    assert shown(asked(truth=7), importance="contrast") == {"truth": [showing.format(7)]}
    assert shown(asked(np.array(CHAT, dtype=object))) == shown(asked())
    own = shown(asked(), importance="contrast", template="{prompt} ({answer})")
    assert own == {"truth": ["[system]Add.[user]3+4? (7)!>"]}
    assert CHAT[1]["content"] == "3+4?"
    text = shown(asked("{3+4}?", "{3+4}?"), importance="contrast")
    assert text == {"truth": ["The right answer is 7. {3+4}?"]}


@pytest.mark.parametrize(
    "row",
    [
        *(asked(truth=truth) for truth in (None, "", " ", ["7"], {"answer": "7"}, True, float("nan"), float("inf"))),
        asked(text=PLAIN + "tools"),  # the host made its prompt in another way
        asked("3+4?", "3+5?"),
        asked([{"role": "user", "content": [{"type": "text", "text": "3+4?"}]}]),
        asked([{"role": "system", "content": "Add."}], "[system]Add.!>"),
        asked(None),
        *(asked(prompt) for prompt in (7, torch.tensor(ids(PLAIN)), ["3+4?"])),
        # A text that is a chat already: the answer would be before its first message.
        asked("<eos>3+4?", "<eos>3+4?"),
    ],
)
def test_without_a_right_answer_or_a_prompt_that_can_show_it_there_is_none(row):
    assert shown(row) == {"truth": [None], "own": [None]}


@pytest.mark.parametrize(
    ("truth", "text"), [(7, "7"), (7.0, "7"), (np.float32(0.5), "0.5"), (np.int64(7), "7"), (" 7.0 ", "7.0")]
)
def test_numbers_are_shown_as_one_would_write_them(truth, text):
    showing = f"[system]Add.[user]The right answer is {text}. 3+4?!>"
    assert shown(asked(truth=truth), importance="contrast") == {"truth": [showing]}


def test_without_a_chat_template_there_is_no_prompt_and_no_error():
    config, tokenizer = OarConfig(importance="contrast"), world.make_tokenizer()
    assert ContextPrompts(config, tokenizer, 100).contexts([asked()]).prompts == {"truth": [None]}
    template = {"chat_template": TOKENIZER.chat_template, "end": "!"}
    assert len(ContextPrompts(config, tokenizer, 100, template).contexts([asked()]).prompts["truth"][0]) > 1


def test_a_long_answer_is_not_shown():
    """`max_answer_tokens` is 4. A truth may be a program's test cases, and a wrong answer half a response."""
    assert shown(asked(truth="7777")) != shown(asked(truth="77777"))
    made = shown(asked(truth="77777"), asked(response="3 #### 88888<eos>"))
    assert [[text is None for text in texts] for texts in made.values()] == [[True, False], [False, True]]


@pytest.mark.parametrize("row", [asked(response="7 #### 7"), asked(response="so 8"), asked(sign=1)])
def test_only_a_wrong_answer_is_shown_as_the_responses_own(row):
    made = shown(row)
    assert made["own"] == [None]
    assert made["truth"] != [None]


@pytest.mark.parametrize("patterns", [[], ["hash", "regex:(5)"], ["python:os:abort"]])
def test_an_own_answer_is_searched_by_named_patterns_alone(patterns):
    settings = {"answer_patterns": patterns, "probe": "last"}
    assert OarConfig.parse({"importance": "contrast", **settings}).contexts == ("truth",)
    with pytest.raises(OarConfigError, match=r"answer_patterns=\[.*\]: contrast_own .*; allowed: one or more names"):
        OarConfig.parse({"importance": "contrast_own", **settings})


@pytest.mark.parametrize("importance", BY_SIGN)
def test_what_has_no_contexts_falls_back_is_counted_and_costs_no_pass(importance):
    """Every pass has as many rows as the batch, so that ranks have equal numbers. A row that is not scored has two tokens."""
    prompts = ContextPrompts(OarConfig(importance=importance, answer_patterns=["hash"]), TOKENIZER, 90, {"end": "!"})
    long = asked([{"role": "user", "content": "3+4?" * 20}], "[user]" + "3+4?" * 20 + "!>")
    sources = [asked(), asked(truth=None), None, long, asked()]
    statuses, calls = [Status.SCORED] * 4 + [Status.NO_ANSWER], []
    status_B = torch.tensor(statuses)
    segments = [torch.full((4,), int(Segment.REASONING)) for _ in sources]

    def log_probs(rows):
        calls.append([tuple(len(part) for part in row) for row in rows])
        return [torch.zeros(4) for _ in rows]

    prompts.contexts(sources).importance(IMPORTANCES[importance], segments, status_B, log_probs)
    names = [Status(int(status)).name for status in status_B]
    assert names == ["SCORED", "NO_CONTEXT", "NO_CONTEXT", "CONTEXT_TOO_LONG", "NO_ANSWER"]
    assert [bool(row.any()) for row in segments] == [True, False, False, False, True]
    assert len(calls) == 2, "the right answer shown, and the own prompt or the own answer shown"
    assert all(
        rows[1:] == [tuple(map(len, NOTHING))] * 4 and rows[0][1] == len(sources[0].response_L) for rows in calls
    )
    metrics = summarize(torch.ones(5, 4), status_B)
    assert (metrics["fallback/no_context"], metrics["fallback/context_too_long"]) == (2 / 5, 1 / 5)


# ---- a plain model


def of_front_door(model, importance, **more):
    """Credit of `world`'s scored responses, with the prompts that `world` says."""
    rows = [*world.SIGNS]
    prompts, responses = ([world.ROWS[row][place] for row in rows] for place in (0, 1))
    given = {"prompts": prompts, "responses": responses, "tokenizer": world.make_tokenizer(), "importance": importance}
    given |= {"truths": [None if row == 4 else row for row in rows], "advantages": [*world.SIGNS.values()]}
    given |= {"context": {"template": "({answer}) {prompt}"}, "temperature": 0.7, "answer_patterns": ["hash"]}
    return oar_plugin.importance(model, **given | more)


@pytest.mark.parametrize("max_tokens", [1, 8192])
def test_contrast_equals_two_forwards_of_a_plain_model(model, folder, max_tokens):
    want = world.contrast(folder)
    credit = of_front_door(model, "contrast", max_tokens=max_tokens)
    assert [status.name for status in credit.status] == ["SCORED"] * 3 + ["NO_CONTEXT"]
    assert credit.metrics["fallback/no_context"] == 1 / 4
    for place, row in enumerate([*world.SIGNS][:3]):
        response = world.encode()[row][1]
        whole = credit.attention_mask[place].nonzero()[-len(response) :, 0]
        torch.testing.assert_close(credit.importance[place, whole], want[row], atol=1e-4, rtol=1e-4)
        assert credit.importance[place, whole].gt(0).any()
        assert not credit.importance[place, : whole[0]].any()
        assert not credit.weights[place].eq(1).all()
    assert not credit.importance[3].any()
    assert credit.weights[3].eq(1).all()


def test_the_sign_of_the_advantage_alone_decides_which_tokens_score(model):
    better, worse = (of_front_door(model, "contrast", advantages=[sign] * 4).importance for sign in (0.3, -2.0))
    assert better.gt(0).any(-1).tolist() == worse.gt(0).any(-1).tolist() == [True, True, True, False]
    assert not ((better > 0) & (worse > 0)).any()


def test_the_own_wrong_answer_takes_the_place_of_the_plain_prompt(model, folder):
    """Here a response's own answer is what it wrote: 36 for row 1, 400 for row 3."""
    credit = of_front_door(model, "contrast_own")
    assert [status.name for status in credit.status] == ["NO_CONTEXT", "SCORED", "SCORED", "NO_CONTEXT"]
    mirrored = of_front_door(model, "contrast_own", truths=["36", "-", "-", "-"])
    assert credit.importance[1].gt(0).any()
    assert not credit.importance[1].equal(mirrored.importance[1])


@pytest.mark.parametrize("importance", BY_SIGN)
def test_what_it_needs_is_said(model, importance):
    with pytest.raises(OarConfigError, match=r"needs 4 .* at fault: truths, advantages of shape \(3,\)$"):
        of_front_door(model, importance, truths=None, advantages=[1, 1, 1])
    for fault in ({"advantages": torch.ones(4, 1)}, {"advantages": torch.tensor(1.0)}, {"prompts": [[1, 2]] * 4}):
        with pytest.raises(OarConfigError, match=r"at fault: (advantages of shape \((4, 1)?\)|token ids as prompts)$"):
            of_front_door(model, importance, **fault)
    with pytest.raises(OarConfigError, match=f"credit.importance={importance}: .*not made here; allowed: fisher"):
        TokenCredit({"importance": importance}, world.make_tokenizer(), "credit")
