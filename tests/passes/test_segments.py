import numpy as np
import pytest

from oar_plugin.credit.answer import Segment, make_finder
from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes.segments import segment_response
from oar_plugin.passes.tokens import TokenBytes
from tests.hosts.engine import world


@pytest.mark.parametrize("number", range(len(world.ROWS)))
def test_a_response_is_cut_into_segments_or_says_why_not(number):
    tokenizer, response = world.make_tokenizer(), world.ROWS[number][1]
    ids = tokenizer(response)["input_ids"]
    arguments = make_finder(("hash",)), TokenBytes(tokenizer), {tokenizer.eos_token_id}, world.MAX_RESPONSE_LENGTH
    segments, status = segment_response(ids, np.ones(len(ids), dtype=bool), *arguments)
    want = {"NOT_NEEDED": "SCORED"}.get(world.STATUS[number], world.STATUS[number])
    assert status == Status[want]
    if status == Status.SCORED:
        assert segments.tolist() == world.segments_of(response).tolist()
    else:
        assert (segments == Segment.OUTSIDE).all()


def test_what_is_not_the_models_own_is_never_reasoning():
    tokenizer = world.make_tokenizer()
    ids = tokenizer("so 3 then 4\n#### 7<eos>")["input_ids"]
    own = np.ones(len(ids), dtype=bool)
    own[:5] = False
    segments, status = segment_response(ids, own, make_finder(("hash",)), TokenBytes(tokenizer), (), 100)
    assert status == Status.SCORED
    assert (segments[:5] == Segment.OUTSIDE).all()
    assert (segments[5:12] == Segment.REASONING).all()
