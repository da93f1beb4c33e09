"""What a run shows: metrics in TRL's log, and files for `oar inspect`."""

from pathlib import Path

import pytest

from oar_plugin.cli.main import main
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.trl import OarGRPOTrainer
from oar_plugin.page.sources import read
from tests.hosts.trl import tiny
from tests.hosts.trl.watched import watched


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    oar = {"dump": {"every": 2, "groups": 1}, "dump.dir": "credit"}
    return watched(tmp_path_factory.mktemp("run"), oar, per_device_train_batch_size=8, max_steps=3)


def test_metrics_are_in_the_log(run):
    scored = tiny.logged(run, "oar/scored")
    assert scored == tiny.logged(run, "oar/answer_found") == [0.75, 0.75, 0.75]
    assert tiny.logged(run, "oar/fallback/no_answer") == tiny.logged(run, "oar/fallback/any") == [0.25] * 3
    assert tiny.logged(run, "oar/dump_failed") == [0, 0, 0]
    assert all(seconds > 0 for seconds in tiny.logged(run, "oar/seconds"))
    for seen, most in zip(run.seen, tiny.logged(run, "oar/weight_max"), strict=True):
        assert (seen.output["advantages"] / seen.plain_B[:, None]).max().item() == pytest.approx(most)


def test_dumps_are_what_the_inspector_reads(run, tmp_path):
    """The first of two groups, at step 1 and at every second step."""
    folder = tmp_path.parent / run.args.output_dir / "credit"
    assert sorted(file.name for file in folder.iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
    found = read([folder]).items
    assert len(found) == 8
    for place, response in enumerate(item for item in found if item.step == 2):
        seen = run.seen[1]
        length = int(seen.output["completion_mask"][place].sum())
        assert response.token_ids == seen.output["completion_ids"][place, :length].tolist()
        assert "".join(response.tokens) == tiny.SIBLINGS[place]
        assert response.prompt == tiny.PROMPTS[2]
        assert response.segments == seen.segments_BL[place, :length].tolist()
        assert response.importance["fisher"] == seen.importance_BL[place, :length].tolist()
        assert response.advantage == pytest.approx(seen.plain_B[place].item())
        got = [weight * response.advantage for weight in response.weights]
        assert got == pytest.approx(seen.output["advantages"][place, :length].tolist())
        assert response.reward == tiny.paid([tiny.SIBLINGS[place]])[0]
        assert (response.group, response.truth, response.mask) == ("0", "5", None)
        assert response.status == Status(int(seen.status_B[place])).name.lower()
    assert main(["inspect", str(folder), "--out", str(tmp_path / "page.html")]) == 0


def test_the_example_of_the_document_trains_and_dumps(tmp_path):
    for part in (tiny.make_model(), tiny.TOKENIZER):
        part.save_pretrained(tmp_path / "model")
    block = Path("docs/hosts.md").read_text().split("```python\n")[1].split("```")[0]
    given = {"model": str(tmp_path / "model"), "config": tiny.arguments(tmp_path, max_steps=1)}
    exec(block, given | {"reward": lambda prompts, **_: [*range(len(prompts))], "data": tiny.data(tiny.PROMPTS)})
    assert read([tmp_path / "credit"]).items


def broken(*arguments):
    raise KeyError("a mistake of ours")


def test_a_dump_that_fails_is_said_once_and_ends_nothing(tmp_path, monkeypatch, caplog):
    """Its other faults are in `tests/test_token_credit.py`."""
    before, _ = _trained(tmp_path / "before")
    monkeypatch.setattr(OarGRPOTrainer, "_known", broken)
    after, made = _trained(tmp_path / "after")
    assert tiny.logged(made, "oar/dump_failed") == [1, 1]
    assert len([record for record in caplog.records if "Training goes on" in record.message]) == 1
    assert tiny.same_weights(before, after)


def _trained(folder):
    made = tiny.make(OarGRPOTrainer, folder, oar={"dump": {"dir": "credit", "every": 1}})
    made.train()
    return tiny.weights(made), made


def test_an_evaluation_scores_nothing(tmp_path):
    made = tiny.make(OarGRPOTrainer, tmp_path, oar={}, per_device_eval_batch_size=4)
    found = made.evaluate(tiny.data(tiny.PROMPTS, 4))
    assert "eval_loss" in found
    assert not any(name.startswith("eval_oar/") for name in found)
