"""What a run shows: metrics in TRL's log, and files for `oar inspect`."""

import math
from pathlib import Path

import pytest

from oar_plugin.cli.main import main
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.trl import OarGRPOTrainer
from oar_plugin.page.sources import read
from tests.asked import GIVEN
from tests.hosts.trl import tiny
from tests.hosts.trl.watched import Watched, watched


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


def test_an_evaluation_scores_nothing(tmp_path):
    made = tiny.make(OarGRPOTrainer, tmp_path, oar={}, per_device_eval_batch_size=2, num_generations_eval=1)
    found = made.evaluate(tiny.data(tiny.PROMPTS, 4))
    assert "eval_loss" in found
    assert not any(name.startswith("eval_oar/") for name in found)


@pytest.mark.parametrize("case", GIVEN["trl"])
def test_a_completion_without_a_finite_reward_is_neither_right_nor_wrong(tmp_path, monkeypatch, caplog, case):
    monkeypatch.setattr(tiny, "paid", lambda completions, **_: case["rewards"])
    monkeypatch.setattr(tiny, "SIBLINGS", tiny.SIBLINGS[:3] + tiny.SIBLINGS[:1])
    trainer = watched(tmp_path, {"dump": {"dir": "credit"}}, max_steps=1)
    (seen,) = trainer.seen
    assert (seen.status_B == Status.BAD_REWARD).nonzero()[:, 0].tolist() == case["bad"]
    assert (seen.status_B == Status.SCORED).nonzero()[:, 0].tolist() == case["scored"]
    assert seen.output["advantages"][case["bad"], 0].equal(seen.plain_B[case["bad"]])
    matter = len(case["bad"] + case["scored"])
    assert tiny.logged(trainer, "oar/fallback/bad_reward") == [len(case["bad"]) / matter]
    given = [None if value is None or not math.isfinite(value) else value >= 0.5 for value in case["rewards"]]
    assert [response.right for response in read([tmp_path / "credit"]).items] == given
    assert [m for m in caplog.messages if "what does the reward function return?" in m]
    assert main(["inspect", str(tmp_path / "credit"), "--out", str(tmp_path / "page.html")]) == 0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_equal_rewards_need_no_credit_though_rounding_gives_them_an_advantage(
    tmp_path, monkeypatch, aggregation, scale
):
    monkeypatch.setattr(tiny, "paid", lambda completions, **_: [0.9] * 8 + [1.0] + [0.0] * 7)
    changes = {"scale_rewards": scale, "multi_objective_aggregation": aggregation, "num_generations": 8}
    (seen,) = watched(tmp_path, {}, per_device_train_batch_size=16, max_steps=1, **changes).seen
    assert seen.plain_B[:8].any()
    assert seen.output["advantages"][:8, 0].equal(seen.plain_B[:8])
    assert seen.status_B[:8].tolist() == [Status.NOT_NEEDED] * 8
    assert Status.NOT_NEEDED not in seen.status_B[8:].tolist()


@pytest.mark.parametrize("case", GIVEN["trl_limits"])
def test_a_completion_that_any_limit_of_the_engine_cut_is_truncated(tmp_path, case):
    def rollout(prompts, trainer):
        completions = [tiny.ids(" 3 and 4 we see 7 #### 5")] * 2 + [tiny.ids(" so 4 #### 4<eos>")] * 2
        return {"prompt_ids": [tiny.ids(p) for p in prompts], "completion_ids": completions, "logprobs": None}

    trainer = tiny.make(Watched, tmp_path, oar={}, rollout=rollout, max_steps=1)
    for name, value in case.get("args", {}).items():  # set on a finished trainer: TRL itself would start vLLM
        setattr(trainer.args, name, value)
    trainer.train()
    assert trainer.seen[0].status_B.tolist() == [Status[case["status"]]] * 2 + [Status.SCORED] * 2
