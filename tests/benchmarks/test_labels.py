"""The study of labels: which units are labelled, the mean of the other kinds, fits, and all of it on a tiny random model."""

import json
import random
from dataclasses import replace

import pytest
import torch

from benchmarks.fidelity.language import Writer
from benchmarks.labels import analysis
from benchmarks.labels.analysis import AGAIN, KINDS, Long, Scored, centred_log, fits, mean_of_others, spread
from benchmarks.labels.study import Settings, drawn_from, measure
from benchmarks.report import silent
from benchmarks.tiny.model import SHAPES, model_of
from benchmarks.tiny.words import make_tokenizer


def test_units_are_spread_and_drawn_tokens_are_others():
    chosen = spread(10, 3, random.Random(0))
    assert [part[0] <= at < part[1] for at, part in zip(chosen, [(0, 3), (3, 6), (6, 10)], strict=True)] == [True] * 3
    assert {tuple(spread(10, 3, random.Random(seed))) for seed in range(400)} >= {(0, 3, 6), (2, 5, 9)}
    assert spread(2, 3, random.Random(0)) == spread(2, None, random.Random(0)) == [0, 1]
    token_T = torch.arange(3).repeat(50)
    drawn = [drawn_from(torch.arange(3), token_T, seed) for seed in (0, 0, 1)]
    assert (drawn[0] == drawn[1]).all()
    assert not (drawn[0] == drawn[2]).all()
    assert not (drawn[0] == token_T).any()


def test_the_mean_of_the_others_leaves_a_kind_and_its_second_draw_out():
    one = torch.tensor([1.0, 3.0])
    scores = dict.fromkeys([*KINDS, AGAIN, "fisher"], one) | {"pad": torch.tensor([0.0, 8.0]), "batch": one.flip(0)}
    # The mean of batch and its second draw is (1, 1) times its mean; the others have (0.5, 1.5).
    assert mean_of_others(scores, "pad").tolist() == [(3 * 0.5 + 1) / 4, (3 * 1.5 + 1) / 4]
    assert mean_of_others(scores, "batch").tolist() == [(3 * 0.5 + 0) / 4, (3 * 1.5 + 2) / 4]


@pytest.mark.parametrize("units", [4, None])
def test_a_fit_finds_what_scores_are_made_of_whatever_a_responses_level(units, monkeypatch):
    monkeypatch.setattr(analysis, "LABELS", (16, 400))
    generator, pool = torch.Generator().manual_seed(0), []
    for level in torch.linspace(-50, 50, 110).double():
        feature_RF = torch.randn(20, 6, generator=generator)
        score_R = (level / 10 + feature_RF.double() @ torch.tensor([2.0, 0, 1, 0, 0, 0]).double()).exp()
        pool.append(
            Scored({"pad": score_R, "sampled": score_R, "batch": score_R.flip(0)}, {"last": feature_RF + level}, True)
        )
    (_, few, _), (_, labels, regressions) = fits(pool, "last", units, 0)
    weight_F2 = regressions["pad"].predict(torch.eye(6))
    assert (few, labels) == ((16, 400) if units else (20, 400))
    assert weight_F2[:, 0].tolist() == pytest.approx([1.55, 0, 0.78, 0, 0, 0], abs=0.15)
    assert weight_F2[:2, 1].abs().max() == 0, "the control does not see them"
    assert centred_log(torch.tensor([0.0, 1.0])).isfinite().all()


def test_a_long_text_is_predicted_from_the_labels_of_others():
    """Two texts say the opposite of each other; so do long units and single tokens, and bfloat16 and float32."""
    x_N, long = torch.randperm(10, generator=torch.Generator().manual_seed(0)).float(), []
    for sign in (1, -1):
        signs = {("float32", 1): sign, ("float32", 4): -sign, ("bfloat16", 1): -sign}
        means = {span: torch.nn.functional.pad(of * x_N[:, None], (0, 5)) for span, of in ((1, 1), (4, -1))}
        long.append(Long([*range(10)], {key: (of * x_N).exp().tolist() for key, of in signs.items()}, means))
    found = analysis.long_predictions(long).groupby(["kind", "span"], sort=False)[["single", "longest"]].mean()
    assert found.to_numpy() == pytest.approx(torch.tensor([[-1, 1], [-1, 1], [1, -1], [0, 0]]).numpy())


def test_the_study_on_a_random_model(monkeypatch, tmp_path):
    make_tokenizer(SHAPES["tiny"].vocab, by_bytes=True).save_pretrained(tmp_path)
    model_of(SHAPES["tiny"], 2048).save_pretrained(tmp_path)
    texts = tmp_path / "texts.jsonl"
    rows = [{"question": f"{n}?", "response": "so " * length + "\n#### 7"} for n, length in ((1, 90), (2, 9), (3, 120))]
    texts.write_text("\n".join(map(json.dumps, rows)))

    def write(self, chats, longest):
        return [([5, 6], self.tokenizer(f"{'and ' * 5} {n}.\n#### {n}<eos>").input_ids) for n in range(len(chats))]

    monkeypatch.setattr(Writer, "write", write)
    monkeypatch.setattr(analysis, "LABELS", (8, 16))
    monkeypatch.setattr(analysis, "DRAWS", 1)
    folder, sizes = tmp_path / "parts", {"judged": 6, "pool": 2, "long": 3}
    settings = Settings(texts, texts, folder, str(tmp_path), ("words",), separator="!", **sizes)
    settings.check()
    report = measure(settings, silent)
    monkeypatch.setattr("benchmarks.labels.study.Collector.run", lambda self: pytest.fail("all is in the folder"))
    again = measure(replace(settings, collect=()), silent)
    report.machine = again.machine = None
    assert again.markdown(None) == report.markdown(None)
    page = report.markdown(None)
    shown = ["Judged: 6 of 6 responses", "2 of 2 other responses", "Long texts: 2 of at most 3", "| sampled |"]
    shown += ["| batch again |", "| all |", "| batch, middle layer | 16 |", "| 16 | 1 to 64 |", "| float32 | 8 |"]
    assert [text for text in shown if text not in page] == []
    report.write(tmp_path / "out")
    runs = json.loads((tmp_path / "out" / f"{report.stem}.json").read_text())["runs"]
    assert {len(column) for column in runs["spans"].values()} == {2 * 4 * 10}
    assert runs["spans"]["narrow"] != runs["spans"]["score"]
