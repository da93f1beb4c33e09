import numpy as np
import pytest

from oar_plugin.credit.answer import Segment, make_finder
from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes.segments import segment_response
from oar_plugin.passes.tokens import TokenBytes
from tests.hosts.engine import world

TOKENIZER = world.make_tokenizer()


def segment(text, others=0, max_answer_tokens=10):
    """Segments and status; the first `others` tokens are not the model's own."""
    ids = TOKENIZER(text)["input_ids"]
    finder, ends = make_finder(("hash",)), {TOKENIZER.eos_token_id}
    longest = world.MAX_RESPONSE_LENGTH, max_answer_tokens
    return segment_response(ids, np.arange(len(ids)) >= others, finder, TokenBytes(TOKENIZER), ends, *longest)


@pytest.mark.parametrize("number", range(len(world.ROWS)))
def test_a_response_is_cut_into_segments_or_says_why_not(number):
    response = world.ROWS[number][1]
    segments, status = segment(response)
    assert status == Status[world.STATUS[number].replace("NOT_NEEDED", "SCORED")]
    if status == Status.SCORED:
        assert segments.tolist() == world.segments_of(response).tolist()
    else:
        assert (segments == Segment.OUTSIDE).all()


def test_what_is_not_the_models_own_is_never_reasoning():
    segments, status = segment("so 3 then 4\n#### 7<eos>", others=5)
    assert status == Status.SCORED
    assert (segments[:5] == Segment.OUTSIDE).all()
    assert (segments[5:12] == Segment.REASONING).all()


@pytest.mark.parametrize(("most", "status"), [(3, Status.SCORED), (2, Status.ANSWER_TOO_LONG)])
def test_a_longer_answer_than_allowed_is_none(most, status):
    segments, found = segment("so\n#### 400<eos>", max_answer_tokens=most)
    assert found == status
    assert (segments != Segment.OUTSIDE).any() == (status == Status.SCORED)
