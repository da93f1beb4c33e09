"""Pages and terminals show hostile names, prompts, responses and settings, and do nothing else."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from oar_plugin.cli.main import main
from oar_plugin.page.inspector import inspector_page
from tests.hostile import PIECES, UNSEEN, names, texts
from tests.page.dumped import HEADER, RESPONSE, write_dump

FEW = settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.generate],
)
"""No shrinking, because each example opens a page."""
FIELDS = st.fixed_dictionaries(dict.fromkeys(("group", "uid", "source", "prompt", "truth", "status"), texts))
SEEN = "text => visible(text)"


@FEW
@given(
    FIELDS,
    st.lists(texts, min_size=1, max_size=4),
    st.dictionaries(texts, st.just([1.0, 2.0, 3.0, 4.0]), min_size=1, max_size=3),
    st.dictionaries(texts, texts, max_size=3),
    texts,
)
def test_the_inspector_shows_hostile_text_in_every_field(opened, fields, words, importance, others, title):
    tokens = list(itertools.islice(itertools.cycle(words), 4))
    response = replace(RESPONSE, **{**fields, "tokens": tokens, "importance": importance})
    config = {**others, **HEADER.config, "importance": next(iter(importance)), "gate": title}
    scales = dict.fromkeys(importance, True)
    header = replace(HEADER, versions=others, model=title, config=config, arbitrary_scale=scales)
    for gate in (title, "two_level"):
        header.config["gate"] = gate
        page, faults = opened(inspector_page([response], header, title))
        page.wait_for_selector("body[data-ready]")
        assert page.locator("h1").count() == 1
        assert page.locator("#groups :is(script, img, a, svg[onload], iframe)").count() == 0
        assert page.locator("script").count() == 2
        assert page.locator("base, iframe, object, embed").count() == 0
        read = page.evaluate("() => [cards[0].r, data.tokens.text.length]")[0]
        assert {name: read[name] for name in fields} == fields
        shown = page.locator("#groups").text_content()
        wanted = {name: page.evaluate(SEEN, text) for name, text in fields.items()}
        assert [name for name in ("group", "uid", "source", "truth", "prompt") if wanted[name] not in shown] == []
        parts = [*page.locator("dt").all_text_contents(), *page.locator("dd").all_text_contents()]
        assert [text for text in [*parts, shown, page.locator("h1").text_content()] if UNSEEN.search(text)] == []
        weights = page.evaluate("() => Array.from(credit(responses[0], nameNow()).weights)")
        assert weights == ([0.5, 1.5, 1.0, 1.0] if gate == title else weights)
        assert page.evaluate("Object.keys(Object.prototype)") == []
        assert faults == []
        page.close()


@settings(FEW, max_examples=60)
@given(FIELDS, texts, names)
def test_responses_steer_no_terminal_and_names_are_no_paths(tmp_path_factory, capsys, fields, word, name):
    folder = tmp_path_factory.mktemp("dumps")
    write_dump(folder / name, 3, **fields, tokens=[word, "a", word, "b"])
    capsys.readouterr()
    assert main(["inspect", str(folder / name), "--format", "text"]) == 0
    assert main(["inspect", str(folder / name)]) == 0
    assert main(["inspect", str(folder / name), "--steps", "7"]) == 2
    assert main(["inspect", str(folder / name / "no")]) == 2
    assert not UNSEEN.search("".join(capsys.readouterr()))
    assert sorted(path.name for path in folder.iterdir()) == [name]
    assert sorted(path.name for path in (folder / name).iterdir()) == ["inspect.html", "step_000003.jsonl"]


@pytest.mark.parametrize("piece", PIECES)
def test_a_header_that_is_refused_is_refused_in_letters_that_are_seen(piece, tmp_path, capsys):
    line = json.dumps({**vars(HEADER), "versions": {piece: 1}}) + "\n"
    (tmp_path / "step_1.jsonl").write_text(line + RESPONSE.line())
    assert main(["inspect", str(tmp_path)]) == 2
    assert not UNSEEN.search("".join(capsys.readouterr()))


def test_an_importance_that_the_header_does_not_have_is_shown(tmp_path):
    write_dump(tmp_path, 3, importance={"of nobody": [0.5, 2.0, 0.0, 0.0]})
    assert main(["inspect", str(tmp_path)]) == 0
