"""Hostile responses through tokenizers of every family, the search for the answer, the actor's pass and the gate.

Half a minute. For an hour: OAR_FUZZ_EXAMPLES=20000 pytest --timeout 0 tests/passes/test_fuzz.py
"""

import functools
import math
import os
import re
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from oar_plugin.config import OarConfig
from oar_plugin.credit import answer
from oar_plugin.credit.answer import AnswerSpan, Segment, find_in_turns, make_finder, segment_tokens
from oar_plugin.credit.diagnostics import FALLBACKS, Status
from oar_plugin.estimator import reshape
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.request import Request
from oar_plugin.passes.segments import segment_rows
from tests.passes.batch import random_model
from tests.passes.families import BUILDERS, tokenizer_and_bytes

EXAMPLES = int(os.environ.get("OAR_FUZZ_EXAMPLES", "40"))
ROWS = 8
"""Responses of one example."""
every_family = pytest.mark.parametrize("family", BUILDERS)
hostile = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def impatient():
    """One of the users' expressions below backtracks for ever on some responses: a search waits for this limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer, "PATTERN_SECONDS", 0.05)
        yield


NAMES = ("boxed", "hash", "answer_tag", "the_answer_is")
MARKERS = [
    "\\boxed{", "\\boxed 5", "\\boxed{5}", "{", "}", "\\{", "\\", "####", "#### 5", "#", "<answer>", "</answer>", "$", "**",
    "the answer is ", "The answer is 5.", "Answer:", "answer", ".", "\n", " ", "\t", "5", "3.14", "\\(", "\\)", "so it is 4",
]  # fmt: skip
LETTERS = [
    "你", "🙂", "👩‍👧", "é", "e\u0301", "鱻", "\N{REPLACEMENT CHARACTER}", "\0", "\x1c", "\x85", "\u00a0", "\u3000", "\u2028",
    "\u202eא", "\u200d", "\u200b", "\ufeff", "ﷺ", "𝟓", "²", "½", "▁", "<0x0A>", "Ġ", "<unk>", "<|end|>", "<think>", "<答案>",
]  # fmt: skip
TEXT = st.one_of(st.sampled_from(MARKERS), st.sampled_from(MARKERS), st.sampled_from(LETTERS), st.text(max_size=6))
# What stands between: text; endless repetition; a place in the vocabulary and beyond it; a part of a text's tokens.
PART = st.one_of(
    TEXT,
    TEXT,
    TEXT,
    st.tuples(st.sampled_from([*MARKERS, *LETTERS, "a"]), st.integers(2, 40)),
    st.integers(0, 10_000),
    st.tuples(st.sampled_from(LETTERS), st.integers(0, 3), st.integers(1, 4)),
)
RESPONSES = st.lists(st.lists(PART, max_size=12), min_size=ROWS, max_size=ROWS)


def tokens(tokenizer, parts):
    """Each part is encoded by itself: the model may write any token behind any other."""
    ids = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part % (len(tokenizer) + 8))
        elif isinstance(part, str):
            ids += tokenizer.encode(part)
        elif len(part) == 2:
            ids += tokenizer.encode(part[0] * part[1])
        else:
            ids += tokenizer.encode(part[0])[part[1] :][: part[2]]
    return ids


def owned(count, seed):
    """Mostly the policy's own tokens; a stretch of a tool's in some responses."""
    own, (start, length) = np.ones(count, dtype=bool), divmod(seed, 7)
    if start % 3 == 0:
        own[start % (count + 1) :][:length] = False
    return own


FINDER = make_finder(NAMES)


def sometimes_fails(text):
    """A user's own function: the last digit; it fails where there is a brace."""
    if "{" in text:
        raise KeyError(text)
    found = [match.start() for match in re.finditer(r"\d", text)]
    return (found[-1], found[-1] + 1) if found else None


PATTERNS = [NAMES, NAMES, (), (f"python:{__name__}:sometimes_fails",), ("hash", r"regex:((?:\w|\w\w)+)[.!]$")]
OWN = "python:tests.own_importance:Saliency"
IMPORTANCES = ["fisher", "oar_g", "entropy", "random", "oar_p", "grail", OWN]
GATES = ["two_level", "bi_level", "top_only", "z_score", "python:tests.own_importance:upper_half"]
# What an importance may come to in a model that has broken down.
SPOILT = st.sampled_from([0.0, math.nan, math.inf, -math.inf, -1.0, -5.0, 1e38, 1e-45])


@functools.cache
def model_of(family):
    vocabulary = len(tokenizer_and_bytes(family)[0]) + 8  # padded, as they are
    return random_model(vocab_size=vocabulary, max_position_embeddings=2**14)


SETTINGS = st.fixed_dictionaries(
    {
        "answer_patterns": st.sampled_from(PATTERNS),
        "importance": st.sampled_from(IMPORTANCES),
        "gate": st.sampled_from(GATES),
        "tau": st.sampled_from([None, 0, 0.4, 1]),
        "beta": st.sampled_from([0, 2, 1e6]),
        "probe": st.sampled_from(["last", "answer_mean", "answer_joint"]),
    }
)


@every_family
@given(RESPONSES, SETTINGS, st.integers(0, 200), SPOILT, st.integers(0, 5))
@hostile
def test_no_response_stops_a_step_and_each_keeps_its_total_or_is_counted(family, responses, given, seed, spoilt, every):
    tokenizer, token_bytes = tokenizer_and_bytes(family)
    encoded = [tokens(tokenizer, parts)[:400] for parts in responses]
    given = given | ({} if given["answer_patterns"] else {"probe": "last"})
    config = OarConfig.parse(given)
    request = Request.of_step(config, 1, max_response_length=300, replacement_token=tokenizer.pad_token_id)
    rows = [(ids, owned(len(ids), seed), number != 3, 1) for number, ids in enumerate(encoded)]

    segments, status_B = segment_rows(rows, request, token_bytes, {tokenizer.eos_token_id})
    token_BL = pad_sequence([torch.tensor([1, *ids]) for ids in encoded], True)
    mask_BL = torch.arange(token_BL.shape[1]) < torch.tensor([[1 + len(ids)] for ids in encoded])
    segments_BL = pad_sequence([torch.nn.functional.pad(row.long(), (1, 0)) for row in segments], True)
    importance_BL = batch_importance(model_of(family), request, token_BL, segments_BL, mask_BL, 2**12)
    assert importance_BL.isfinite().all()
    reasoning_BL = segments_BL == Segment.REASONING
    assert not importance_BL[~reasoning_BL].any()
    if every:
        importance_BL[:, ::every] = spoilt
    advantage_BL = torch.randn(ROWS, 1).expand(token_BL.shape)
    done = reshape(advantage_BL, importance_BL, reasoning_BL, status_B, config)

    scored_B = done.status_B == Status.SCORED
    assert (scored_B <= (status_B == Status.SCORED)).all()
    assert done.weight_BL.isfinite().all()
    assert (done.weight_BL >= 0).all()
    usable_BL = reasoning_BL & scored_B[:, None]
    assert (done.weight_BL[~usable_BL] == 1).all()
    count_B = usable_BL.sum(-1)
    total_B = done.weight_BL.double().masked_fill(~usable_BL, 0).sum(-1)
    assert ((total_B - count_B).abs() <= 1e-3 * count_B).all()
    assert torch.equal(done.advantage_BL, advantage_BL * done.weight_BL)

    metrics, needed = done.metrics, int((done.status_B != Status.NOT_NEEDED).sum())
    assert all(math.isfinite(value) for value in metrics.values())
    assert needed == ROWS - 1
    for reason in FALLBACKS:
        counted = round(metrics[f"fallback/{reason.name.lower()}"] * needed)
        assert counted == int((done.status_B == reason).sum())
    assert round(metrics["fallback/any"] * needed) + int(scored_B.sum()) == needed


def segments_slowly(pieces, own):
    """Character by character, what each is for; then a token by its characters, and one without any by its neighbours."""
    turns = [b""]
    for piece, mine, mine_before in zip(pieces, own, [True, *own], strict=False):
        turns += [b""] if mine and not mine_before else []
        turns[-1] += piece if mine else b"\n" * len(piece)
    texts = [turn.decode("utf-8", "surrogateescape") for turn in turns]
    at, found = find_in_turns(FINDER, texts) or (0, None)
    if found is None and len(turns) > 1:  # a box may go on in a later turn
        texts = [b"".join(turns).decode("utf-8", "surrogateescape")]
        found = FINDER(texts[0])
        found = found if found and "boxed" in texts[0][found.marker_start : found.start] else None
    if found is None:
        return None
    text, kinds = "".join(texts), []
    found = AnswerSpan(*(place + len("".join(texts[:at])) for place in found))
    for place, character in enumerate(text):
        before_answer = Segment.REASONING if place < found.marker_start else Segment.CONCLUDE
        in_answer = Segment.ANSWER if place < found.end else Segment.AFTER
        kind = before_answer if place < found.start else in_answer
        kinds += [kind] * len(character.encode("utf-8", "surrogateescape"))
    found, at, kinds = [], 0, [Segment.REASONING, *kinds, Segment.AFTER]
    for piece, mine in zip(pieces, own, strict=True):
        here, behind = kinds[at + 1 : at + 1 + len(piece)], kinds[at + 1]
        if not mine:
            found.append(Segment.OUTSIDE)
        elif piece:
            first = [kind for kind in (Segment.ANSWER, Segment.CONCLUDE) if kind in here]
            found.append([*first, here[0]][0])
        elif behind == Segment.AFTER:
            found.append(Segment.AFTER)
        else:
            found.append(Segment.REASONING if kinds[at] == Segment.REASONING else Segment.CONCLUDE)
        at += len(piece)
    return found if Segment.ANSWER in found else None


@every_family
@given(RESPONSES, st.integers(0, 200))
@hostile
def test_segments_are_those_of_a_slow_search(family, responses, seed):
    tokenizer, token_bytes = tokenizer_and_bytes(family)
    for parts in responses:
        pieces = token_bytes.pieces(tokens(tokenizer, parts)[:400])
        own = owned(len(pieces), seed)
        found = segment_tokens(pieces, FINDER, own)
        assert found is None or found.dtype == np.int8
        assert (None if found is None else found.tolist()) == segments_slowly(pieces, own)


# ---- work and memory


WORST = [
    "{", "\\(", "Answer:", "{answer: ", "answer" + 900 * "{" + ".", "\\boxed{", "\\boxed{1} ", "<answer>", "a", " ", "\n", "🙂",
    "the answer is the answer is ", "the answer is 5, so ", "the ", "#### ", "\\", "$ ", "#### Note: ", "(Answer: `",
    "\\boxed{1} or ",
]  # fmt: skip


BESIDE = [*'\n[("`:-1C', "Answer:\n- ", "</think>", "note: ", "####", "_", ", "]


def every_worst(test):
    return functools.reduce(lambda test, part: example([part])(test), WORST, test)


def calls_of(pieces):
    """How many functions, of Python and of C, a search calls: several for each match."""
    called = []
    sys.setprofile(lambda frame, event, argument: called.append(event))
    segment_tokens(pieces, FINDER)
    sys.setprofile(None)
    return len([event for event in called if event in ("call", "c_call")])


@pytest.mark.parametrize("frame", ["{}", "\\boxed{{{}}}", "<answer>{}</answer>"])
@given(st.lists(st.sampled_from(WORST + BESIDE), min_size=1, max_size=4))
@settings(max_examples=40)
@every_worst
def test_calls_and_memory_of_a_search_grow_with_the_text_and_no_faster(frame, fragments):
    """A search that goes over the text for each of its parts makes 100 times as many calls in ten times the text. Memory of the
    worst that was seen is 160 bytes a byte of text."""
    part = "".join(fragments)
    number = max(4, 2000 // len(part.encode()))  # the last part may be cheaper than the others
    small, large = (frame.format(part * times) for times in (number, 10 * number))
    few, many = (calls_of([bytes([byte]) for byte in text.encode()]) for text in (small, large))
    assert many < 20 * few + 100
    tracemalloc.start()
    FINDER(large)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 * len(large.encode()) + 50_000
