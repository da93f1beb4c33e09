"""The inspector's page in a real browser: its numbers are the package's, and its controls work."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import Status, effective_sample_size, top_share
from oar_plugin.credit.gate import GATES
from oar_plugin.estimator import reshape
from oar_plugin.page.inspector import inspector_page
from oar_plugin.page.record import Header
from tests.page.dumped import CASES, RESPONSE

CONFIG = {"importance": "fisher", "gate": "two_level", "tau": 0.85, "beta": 2.0, "floor": 0.1}
HEADER = Header(versions={"verl": "0.9.1"}, config=CONFIG, arbitrary_scale={"fisher": True, "oar_g": False})
WORDS = ["so", " 3", " +", " 4", " =", " 7", "\n", " ####", " 7", "<eos>"]
SEGMENTS = [1, 1, 1, 1, 1, 1, 1, 2, 3, 4]


def made(uid="u", words=WORDS, segments=None, seed=0, **changes):
    random, count = np.random.default_rng(seed), len(words)
    segments = segments or (SEGMENTS if count == len(SEGMENTS) else [1] * count)
    scores = {name: random.lognormal(0, 2, count).astype(np.float32) for name in ("fisher", "oar_g")}
    values = {
        "weights": [1.0] * count, "token_ids": [sum(word.encode("utf-8", "replace")) for word in words], "tokens": list(words),
        "segments": segments,
        "importance": {name: (score * (np.array(segments) == 1)).tolist() for name, score in scores.items()},
        "log_probs": (-random.exponential(1, count)).tolist(), "entropies": random.exponential(1, count).tolist(),
    }  # fmt: skip
    return replace(RESPONSE, uid=uid, **values | changes)


WRONG = {"reward": 0.0, "advantage": -1.0}


def by_package(responses, name="fisher", **settings):
    """Weights, final status, and [ESS ratio, top-10 % mass] of each response, computed by the package."""
    config = OarConfig.parse({**CONFIG, "importance": name, **settings})
    status = torch.tensor([int(Status[response.status.upper()]) for response in responses])
    importance = pad_sequence([torch.tensor(response.importance[name]) for response in responses], True)
    reasoning = pad_sequence([torch.tensor(response.segments) for response in responses], True) == 1
    result = reshape(torch.ones(importance.shape), importance, reasoning, status, config)
    figures = [measure(result.weight_BL, reasoning) for measure in (effective_sample_size, top_share)]
    made_of = (result.weight_BL, result.status_B, torch.stack(figures, -1))
    rows = zip(responses, *(part.tolist() for part in made_of), strict=True)
    return [(weights[: len(r.tokens)], Status(code).name.lower(), told) for r, weights, code, told in rows]


def expected(response):
    return by_package([response])[0][0]


@pytest.fixture
def show(opened):
    """Opens the page of some responses; an error of its script or a request fails the test."""
    found = []

    def shown(responses, header=HEADER, as_recorded=False, **options):
        page, faults = opened(inspector_page(responses, header, "A run <1>", as_recorded), **options)
        found.append(faults)
        page.wait_for_selector("body[data-ready]")
        return page

    yield shown
    assert found == [[]] * len(found)


SET = "(node, value) => { node.value = value; node.dispatchEvent(new Event('input', {bubbles: true})); }"


def choose(page, **controls):
    """Set controls like a user; playwright moves sliders by whole steps only."""
    for name, value in controls.items():
        page.locator(f"[name={name}]").evaluate(SET, value)


def test_the_controls_set_the_gate_that_weighs_every_response(show):
    responses = [made(str(seed), seed=seed, status="scored" if seed % 5 else "truncated") for seed in range(30)]
    page = show(responses)
    told = """name => responses.map(r => { const {weights, status} = credit(r, name), figures = diagnostics(r, name);
        return [Array.from(weights), status, figures && [figures.ess, figures.top]]; })"""
    choose(page, outcome="wrong")  # no response is drawn: this test compares numbers
    for gate, name in itertools.product(GATES, ("fisher", "oar_g")):
        settings = {"gate": gate, "tau": 0.55, "beta": 7.3, "floor": 0.05}
        choose(page, **settings)
        right = by_package(responses, name, **settings)
        for (weights, status, figures), (wanted, final, numbers) in zip(page.evaluate(told, name), right, strict=True):
            assert np.abs(np.subtract(weights, wanted)).max() < 1e-6, (settings, name)
            assert status == final
            assert figures == (pytest.approx(numbers, rel=1e-5) if final == "scored" else None)


SCORES = st.lists(
    st.floats(0, 1e6, width=32) | st.floats(0, 2**-40, width=32) | st.sampled_from([0.0, 1.0, 1 + 2**-23, 1e30]),
    min_size=1,
    max_size=60,
)
COMPUTED = """([scores, settings, arbitraryScale]) => {
    const r = {...responses[0], length: scores.length, segment: scores.map(() => "reasoning"), importances: ["fisher"],
        importance: {fisher: Float32Array.from(scores)}, reasoning: Uint32Array.from(scores.keys()), scores: {}, credit: {}};
    data.importances.fisher = {arbitraryScale};
    const {weights, status} = r.credit.fisher = weigh(r, "fisher", settings), figures = diagnostics(r, "fisher");
    return [Array.from(weights), status, figures && [figures.ess, figures.top]]; }"""


def test_the_pages_gates_are_those_of_the_package_for_any_scores(show):
    """The page's JavaScript implements the gates a second time; this test holds the two equal."""
    page = show([made()])
    assert page.evaluate("Object.keys(GATES)") == page.evaluate("Object.keys(data.gates)") == list(GATES)
    places, tau, beta, floor = st.integers(0, 100), st.integers(0, 100), st.floats(0, 10), st.floats(0.01, 1)

    @settings(max_examples=300, phases=[Phase.explicit, Phase.generate])  # a browser is too slow to shrink failures
    @given(SCORES, st.sampled_from(list(GATES)), tau, beta, floor, st.sampled_from(["fisher", "oar_g"]), places)
    def equal(scores, gate, hundredths, beta, floor, name, ties):
        scores = [scores[0] if place < ties * len(scores) / 100 else score for place, score in enumerate(scores)]
        chosen = {"gate": gate, "tau": hundredths / 100, "beta": beta, "floor": floor}
        response = made(words=["w"] * len(scores), segments=[1] * len(scores), importance={name: scores})
        ((wanted, final, numbers),) = by_package([response], name, **chosen)
        weights, status, figures = page.evaluate(COMPUTED, [scores, chosen, name == "fisher"])
        assert status == final
        np.testing.assert_allclose(weights, wanted, rtol=2e-6)
        assert figures == (pytest.approx(numbers, rel=1e-5) if final == "scored" else None)

    equal()


def test_what_was_recorded_is_shown_where_the_page_cannot_compute_it(show):
    weights = [2.0, *[1.0] * 5, 0.0, 1.0, 1.0, 1.0]
    none = made("none", importance={}, weights=None, status="not_scored")
    for gate, importance in (("python:mine:gate", made().importance), ("two_level", {})):
        header = replace(HEADER, config=CONFIG | {"gate": gate})
        page = show([made(weights=weights, importance=importance), none], header)
        assert page.evaluate("responses.map(r => credit(r, nameNow()).weights?.[0] ?? null)") == [2.0, None]
    page = show([made(weights=weights), none], header=replace(HEADER, config=CONFIG | {"gate": "python:mine:gate"}))
    assert page.locator("[name=tau]").is_disabled()
    choose(page, gate="two_level")
    assert page.evaluate("() => Array.from(credit(responses[0], 'fisher').weights)") == pytest.approx(expected(made()))


def test_a_fallback_and_other_settings_are_shown_as_they_were_trained_on(show):
    weights, fallback = [2.0, *[1.0] * 5, 0.0, 1.0, 1.0, 1.0], made("fallback").importance["fisher"]
    main = made("main", weights=weights, importance={"oar_p": made(seed=4).importance["fisher"]})
    other = made("fallback", weights=weights, importance={"fisher": fallback})
    header = replace(HEADER, config=CONFIG | {"importance": "oar_p"}, arbitrary_scale={"oar_p": False, "fisher": False})
    told = """name => responses.map(r => { const {weights, status} = credit(r, name);
        return [status, Array.from(weights), diagnostics(r, name).ess]; })"""
    page = show([main, other], header)
    for name in ("oar_p", "fisher"):
        for status, as_run, ess in page.evaluate(told, name):
            assert (status, as_run) == ("scored", weights)
            assert ess == pytest.approx(7 / 9)
    choose(page, status="scored", gate="bi_level")
    for (_, seen, _), response in zip(page.evaluate(told, "oar_p"), (main, other), strict=True):
        stands_in = replace(response, importance={"oar_p": next(iter(response.importance.values()))})
        assert seen == pytest.approx(by_package([stands_in], "oar_p", gate="bi_level", tau=None)[0][0])
    assert show([made(weights=weights)]).evaluate(told, "fisher")[0][1] == pytest.approx(expected(made()))
    page = show([made(weights=weights)], as_recorded=True)
    assert page.evaluate(told, "fisher")[0][1] == weights


def test_what_a_tool_wrote_is_not_pushed(show):
    response = made(mask=[1, 1, 0, 0, *[1] * 6], segments=[1, 1, 0, 0, 1, 1, 1, 2, 3, 4])
    page = show([response])
    assert page.locator(".tokens .tool").all_text_contents() == ["+", "4"]
    pushes = page.evaluate("responses[0].segment.map((_, i) => COLOURS.push.value(responses[0], 'fisher')(i))")
    assert [i for i, push in enumerate(pushes) if np.isnan(push)] == [2, 3]


def test_numbers_survive_the_journey(show):
    responses = [made(seed=1), made("b", seed=2, log_probs=None, entropies=[0.0, float("nan"), 30.0, *[1e-3] * 7])]
    page = show([*responses, made("empty", words=[], segments=[])])
    read = page.evaluate("responses.map(r => [r.importance.fisher, r.logProb, r.entropy].map(x => [...x].map(String)))")
    numbers = [[np.array(row, float) for row in rows] for rows in read[:2]]
    for response, (importance, log_probs, entropies) in zip(responses, numbers, strict=True):
        assert importance.tolist() == response.importance["fisher"]
        for row, right in ((log_probs, response.log_probs or [np.nan] * 10), (entropies, response.entropies)):
            error = np.abs(row - right) / (1.1e-3 + 5.1e-3 * np.abs(right))
            assert (np.isnan(row) == np.isnan(right)).all()
            assert not (error > 1).any()


def test_hostile_text_is_shown_and_does_nothing(show):
    as_it_is = ["<b>x</b>", "</script><script>document.title='gone'</script>", "-->", "<!--", "{{ 7 * 7 }}", "&lt;"]
    signs = {"\u202eabc": "⟨U+202E⟩abc", "\u2066": "⟨U+2066⟩", "\0": "⟨U+0000⟩", "\x1b": "⟨U+001B⟩"}
    signs |= {"\u200b": "⟨U+200B⟩", "\ud83d": "⟨U+D83D⟩", "\\xe2": "\\xe2", "😀": "😀", "שלום": "שלום"}
    signs |= {"עברית": "עברית", "\ufeff": "⟨U+FEFF⟩", "\t": "⇥", "": "∅", " ": "␣", "\r\n": "⟨U+000D⟩⏎\n"}
    words = [*as_it_is, *signs]
    bad = "<img src=x onerror=\"document.title='gone'\">\u202e\0\ud800"
    header = replace(HEADER, model="/models/a/<b>")
    page = show([made(bad, words, prompt=bad, truth=bad, source=bad, group=bad, status=bad)], header)
    assert page.title() == page.locator("h1").text_content() == "A run <1> · a/<b> · step 3"
    assert page.locator("#groups :is(script, img, b)").count() == 0
    assert page.locator(".tokens .t").all_text_contents() == [*as_it_is, *signs.values()]
    assert "⟨U+202E⟩⟨U+0000⟩⟨U+D800⟩" in page.locator(".prompt pre").text_content()
    page.locator(".tokens .t").nth(len(as_it_is)).hover()
    assert "⟨U+202E⟩abc" in page.locator("#tip").text_content()


def test_pointing_tells_the_numbers_and_a_click_pins(show):
    response = made(seed=3)
    page = show([response])
    tokens, tip = page.locator(".tokens .t"), page.locator("#tip")
    weight = expected(response)[1]
    rank = 1 + sum(score > response.importance["fisher"][1] for score in response.importance["fisher"][:7])
    tokens.nth(1).hover()
    wanted = ["2 of 10, reasoning", f"rank {rank} of 7", f"weight{weight:.3f}, × advantage +", "log-prob-", "entropy"]
    assert [said for said in wanted if said not in tip.text_content()] == []
    tokens.nth(2).click()
    tokens.nth(5).hover()
    assert "3 of 10" in tip.text_content(), "a pin stays"


def test_filters_search_and_steps(show):
    responses = [
        made("a", step=1),
        made("b", step=1, source="other", **WRONG),
        made("c", step=2, status="no_answer", prompt="needle"),
        made("d", [" hay", " ne", "edle", "s"], step=3),
    ]
    page = show(responses)
    assert page.title() == "A run <1> · steps 1, 2, 3"

    def left():
        return page.evaluate("cards.filter(card => card.node.checkVisibility()).map(card => card.r.uid).join('')")

    cases = [
        ({"outcome": "right"}, "acd"), ({"outcome": "wrong"}, "b"), ({"status": "no_answer"}, "c"), ({"source": "other"}, "b"),
        ({"step": 1}, "ab"), ({"step": 3}, "d"), ({"search": "NEEDLE"}, "cd"), ({"search": "nowhere"}, ""),
    ]  # fmt: skip
    nothing = {"outcome": "", "status": "", "source": "", "step": 0, "search": ""}
    for controls, uids in cases:
        choose(page, **nothing | controls)
        assert left() == uids, controls
    choose(page, **nothing | {"search": "needle"})
    page.locator(".hit", has_text="edle").wait_for()
    choose(page, **nothing)
    for key, uids in (("]", "ab"), ("]", "c"), ("[", "ab"), ("[", "abcd")):
        page.keyboard.press(key)
        assert left() == uids


def test_siblings_stand_side_by_side_with_their_first_difference_marked(show):
    near, far = [*WORDS[:4], " -", *WORDS[5:]], ["no", *WORDS[1:]]
    responses = [made("right"), made("near", near, **WRONG), made("far", far, **WRONG), made("twin")]
    page = show(responses)
    marks = page.evaluate("Object.fromEntries(cards.map(card => [card.r.uid, card.differs.place]))")
    assert marks == {"right": 4, "twin": 4, "near": 4, "far": 0}
    assert page.locator(".differs:visible").all_text_contents()[1:] == ["=", "=", "-", "no"]
    lefts = "['right', 'near'].map(uid => cards.find(card => card.r.uid === uid).node.getBoundingClientRect().left)"
    right, near = page.evaluate(lefts)
    assert right < near


def test_colours_say_which_way_and_how_much(show):
    wrong = made("wrong", seed=5, **WRONG)
    page = show([made(seed=5), wrong])
    colour = "([c, i]) => getComputedStyle(cards[c].shown[0].spans[i]).backgroundColor.match(/[\\d.]+/g).map(Number)"
    top = int(np.argmax(expected(made(seed=5))))
    blue, orange = page.evaluate(colour, [0, top]), page.evaluate(colour, [1, top])
    assert blue[2] > blue[0]
    assert orange[0] > orange[2]
    assert blue[3] == orange[3] > page.evaluate(colour, [0, 7])[3] > 0, "weight 1 is paler than a boosted token's"
    for mode in ("weight", "importance", "logProb", "entropy"):
        choose(page, colour=mode)
        assert len({tuple(page.evaluate(colour, [0, i])) for i in range(7)}) > 1, mode


def test_the_summary_counts_what_the_filters_show(show):
    words = [" 3", " +", " x", "."] * 9
    responses = [made(str(i), words, seed=i, reward=i % 2, step=1 + i % 2) for i in range(6)]
    page = show(responses)
    for controls, kept in (({}, responses), ({"outcome": "right"}, responses[1::2])):
        choose(page, **controls)
        page.evaluate("summarize()")
        ess, top = np.mean([figures for *_, figures in by_package(kept)], 0)
        assert f"mean ESS ratio {ess:.3g}, mean top-10 % mass {top:.3g}" in page.locator("#figures").text_content()
        rows = page.evaluate("[...byId('types').rows].map(row => [...row.cells].map(cell => cell.textContent))")
        assert [row[0] for row in rows[1:]] == ["digits", "operators", "words", "marks"]
        right = np.mean([w for r in kept if r.right for w in expected(r)[0::4]])
        assert rows[1][1:3] == [str(9 * len(kept)), f"{right:.2f}"]


@pytest.mark.parametrize("case", CASES["page"].values(), ids=CASES["page"])
def test_what_lacks_advantages_rewards_or_weights_shows_the_rest_and_says_why(case, show):
    changes, *wanted, titles = case
    page = show(responses := [made(str(i), seed=i, **change) for i, change in enumerate(changes)])
    page.evaluate("summarize()")
    assert page.evaluate("[elements.colour.value, byId('why').textContent, byId('typesNote').textContent]") == wanted
    rows = page.evaluate("[...byId('types').rows].map(row => [...row.cells].map(cell => cell.textContent))")
    assert rows[:1] == [["", "tokens", *titles]] * bool(titles)
    if len(titles) == 1:
        assert rows[1][2] == f"{np.mean([expected(r)[i] for r in responses for i in (1, 3, 5)]):.2f}"


def test_filters_list_what_occurs_and_how_often_also_a_status_of_tomorrow(show):
    absent = [made(reward=reward, status="tomorrow_s_fault") for reward in (None, float("nan"), float("inf"))]
    page = show([made(), made(**WRONG), *absent])
    listed = page.evaluate("['status', 'outcome'].map(name => [...elements[name].options].map(option => option.text))")
    assert listed[0] == ["all", "weights applied (2)", "tomorrow s fault (3)"]
    assert listed[1] == ["all", "no reward (3)", "right (1)", "wrong (1)"]


@pytest.mark.parametrize("size", [(1300, 900), (950, 700), (800, 900), (400, 700)])
def test_a_pinned_box_covers_neither_controls_nor_its_token_and_no_status_is_cut(size, show):
    texts = {"words": WORDS[:7] * 20, "segments": [1] * 140, "status": "timed_out_" * 9}
    page = show([made(**texts), made(**texts, **WRONG)], size=size)
    page.locator("#side").evaluate("side => side.open = true")
    covered = """() => [byId("side"), byId("legend"), pinned(), byId("tip")].map(node => node.getBoundingClientRect()).filter(
        (a, i, [,,, b]) => i < 3 && a.right > b.left && a.left < b.right && a.bottom > b.top && a.top < b.bottom).length"""
    for place in (0, 70, 139, 140, 210, 279):
        page.locator(".tokens .t").nth(place).click()
        assert page.evaluate(covered) == 0, place
    assert page.locator(".chips").first.evaluate("chips => chips.scrollWidth == chips.clientWidth")


def test_two_hundred_responses_are_small_and_not_all_are_drawn_at_once(show):
    random = np.random.default_rng(0)
    ids = np.minimum(random.zipf(1.2, (200, 1000)), 150_000).tolist()
    responses = [made(str(i), [f" tok{token}" for token in row], None, i, token_ids=row) for i, row in enumerate(ids)]
    for response in responses:
        del response.importance["oar_g"]
    assert len(inspector_page(responses, HEADER, "t")) < 2e6
    page = show([*responses[:20], made("long", [" word"] * 16_000, group="first")])
    assert page.locator(".tokens .t").count() < 20_000


def test_nothing_comes_from_elsewhere_and_no_response_is_a_page_too(show):
    page = inspector_page([made()], HEADER, "t")
    assert not re.search(r"https?://|<link|src=|@import|url\(", page)
    assert RESPONSE.prompt not in page, "text stands in the packed data alone"
    show([]).get_by_text("0 of 0 responses").wait_for()
