"""What a dump holds and when, and that nothing that goes wrong with it reaches the run. The queue is a stand-in."""

import errno
import logging
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from verl.protocol import DataProto

from benchmarks.tiny.words import make_tokenizer
from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.verl.trainer_credit import answer_mismatch
from oar_plugin.hosts.verl.viewer import QueuedBatch, padded_batch, show
from oar_plugin.page.dumps import Sibling, choose
from oar_plugin.page.record import parse_header, parse_response
from oar_plugin.passes.request import SHOWN, WEIGHTS
from oar_plugin.token_credit import TokenCredit
from tests.hosts.answer import answer_of
from tests.hosts.engine.world import nested

TOKENIZER = make_tokenizer(384)
IDS = TOKENIZER.encode(" 3 so 4 then 7", add_special_tokens=False)
SCORED, NOT_NEEDED, NO_ANSWER = Status.SCORED, Status.NOT_NEEDED, Status.NO_ANSWER


def test_groups_with_both_outcomes_are_chosen_first():
    for rewards, statuses, groups, chosen in (
        # Three groups of two: the one with both outcomes, then the one that was scored, then the one that fell back.
        ([1, 1, 1, 0, 1, 0], [SCORED, SCORED, SCORED, SCORED, NO_ANSWER, NO_ANSWER], 3, ["23", "01", "45"]),
        ([1, 0, 1, 0, 1, 0], [NO_ANSWER, NO_ANSWER, SCORED, NO_ANSWER, SCORED, SCORED], 2, ["23", "45"]),
        ([0.1, 0, 1, 0.1, 0, 0], [SCORED] * 6, 1, ["23"]),  # a reward for the form alone is no right answer
        ([1, 0, 1, 1, 0, 0], [SCORED, *[NOT_NEEDED] * 5], 3, ["01"]),  # siblings come whole
        ([1, 1, 1, 1, 1, 1], [NOT_NEEDED] * 6, 3, []),
    ):
        siblings = map(Sibling, "aabbcc", "012345", rewards, statuses)
        assert ["".join(one.uid for one in group) for group in choose(siblings, groups)] == chosen


def test_siblings_come_in_the_order_of_sampling_without_rows_that_verl_added():
    keys = ["b_x_10_0", "a_2_0", "b_x_2_1", "b_x_2_0", "a_0_0"]
    own_B, scores = torch.tensor([1, 1, 1, 1, 0]).bool(), nested([torch.tensor([0.0, row]) for row in range(5)])
    read = lambda keys, select_fields: TensorDict({"rm_scores": scores}, 5)  # noqa: E731
    found = list(QueuedBatch(1, keys, own_B, own_B, torch.tensor([0, 1, 2, 3, 4]), read).siblings())
    assert [one.uid for one in found] == ["b_x_2_0", "b_x_2_1", "b_x_10_0", "a_2_0"]
    assert found[0] == Sibling("b_x", "b_x_2_0", 3.0, 3)


LENGTHS = torch.tensor([6, 4, 5, 5, 3, 6])
PLACE_BL = torch.arange(6).expand(6, 6)
REAL_BL, LAST_BL = LENGTHS[:, None] > PLACE_BL, LENGTHS[:, None] - 1 == PLACE_BL


class World:
    """Three groups of two, each right and wrong, of `LENGTHS`; the batch of the trainers of v1, or (`padded`) of the other."""

    def __init__(self, folder, without=(), padded=False, **dump):
        self.oar = OarConfig.parse({"dump": {"dir": "dump", "every": 3} | dump})
        self.folder, self.asked, self.padded = folder / "dump", [], padded
        sources = np.array(["sums"] * 6, object)
        self.others = {"reward_model": np.array([{"ground_truth": 7}] * 6), "data_source": sources}
        self.tensors = {
            "rm_scores": LAST_BL * torch.tensor([1.0, 0.0] * 3)[:, None],
            "prompts": torch.tensor([IDS[:2]] * 6),
            "responses": torch.tensor([*IDS, 0])[PLACE_BL].masked_fill(LAST_BL, TOKENIZER.eos_token_id),
            "old_log_probs": -PLACE_BL / 8,
            "entropy": PLACE_BL / 4,
            "response_mask": (PLACE_BL != 1).long(),
            "advantages": torch.tensor([1.0, -1.0] * 3)[:, None] * REAL_BL,
        }
        for name in without:
            (self.others if name in self.others else self.tensors).pop(name)
        self.restart()

    def restart(self):
        self.credit = TokenCredit(self.oar, TOKENIZER, home=self.folder.parent)

    def read(self, keys, select_fields):
        self.asked.append((len(keys), tuple(select_fields)))
        rows = [self.keys.index(key) for key in keys]
        columns = {name: self.tensors[name][rows] for name in select_fields if name in self.tensors}
        real = {"prompts": torch.ones(len(rows), 2).bool()}
        fields = {name: torch.nested.masked_select(c, real.get(name, REAL_BL[rows])) for name, c in columns.items()}
        plain = {name: NonTensorStack(*self.others[name][rows]) for name in select_fields if name in self.others}
        return TensorDict(fields | plain, len(keys))

    def batch(self, step):
        segments_BL = torch.where(LAST_BL, int(Segment.ANSWER), int(Segment.REASONING)) * REAL_BL
        importance_BL = torch.rand(6, 6, generator=torch.Generator().manual_seed(step)) * REAL_BL
        rows = ([row[:n] for row, n in zip(field, LENGTHS, strict=True)] for field in (importance_BL, segments_BL))
        answer = answer_of(*rows, [SCORED] * 6, self.oar)
        self.tensors |= {name: answer[name].to_padded_tensor(0) for name in (*SHOWN, WEIGHTS)}
        status_B, every_B = torch.zeros(6).long(), torch.ones(6).bool()
        self.keys = [f"{uid}_{session}_0" for uid in "abc" for session in (0, 1)]
        if not self.padded:
            return QueuedBatch(step, self.keys, every_B, every_B, status_B, self.read)
        tensors = self.tensors | {"attention_mask": torch.cat([torch.ones(6, 2), REAL_BL], 1).long()}
        proto = DataProto.from_dict(tensors, {"uid": np.array([*"aabbcc"]), **self.others})
        return padded_batch(step, proto, status_B, {})

    def show(self, step, loggers=()):
        return show(self.credit, self.batch(step), dict(loggers))

    def lines(self, step):
        first, *others = (self.folder / f"step_{step:06d}.jsonl").read_text().splitlines()
        return parse_header(first), [parse_response(line) for line in others]

    def files(self):
        return sorted(path.name for path in self.folder.iterdir())


@pytest.mark.parametrize("padded", [False, True])
def test_a_file_holds_the_header_and_whole_groups_with_all_that_is_known(padded, tmp_path):
    world = World(tmp_path, padded=padded)
    metrics = world.show(1)
    assert metrics["oar/dump_failed"] == 0
    head, rows = world.lines(1)
    assert head.versions.keys() >= {"verl", "torch", "transformers"}
    assert (head.run, head.model) == (tmp_path.name, TOKENIZER.name_or_path)
    assert (head.config["tau"], head.config["dump"]["every"], head.arbitrary_scale) == (0.85, 3, {"oar_p": False})
    assert [(row.group, row.uid, row.right) for row in rows[:2]] == [("a", "a_0_0", True), ("a", "a_1_0", False)]
    assert [row.group for row in rows] == [*"aabb"]
    row = rows[1]
    assert (row.tokens, row.token_ids) == ([" 3", " so", " 4", "<eos>"], [*IDS[:3], TOKENIZER.eos_token_id])
    assert (row.prompt, row.truth, row.source, row.status, row.step) == (" 3 so", "7", "sums", "scored", 1)
    assert (row.advantage, row.reward, row.log_probs[2], row.entropies[3]) == (-1.0, 0.0, -0.25, 0.75)
    assert row.mask == [1, 0, 1, 1]
    assert sum(row.weights) == pytest.approx(4, rel=1e-5)
    assert max(row.importance["oar_p"]) > 0
    assert padded or [rows for rows, _ in world.asked] == [6, 4], "text and scores of the chosen rows only"


@pytest.mark.parametrize("name", ["pred", "extracted_answer", "extra_fields"])
@pytest.mark.parametrize("padded", [False, True])
def test_answers_that_the_reward_read_otherwise_are_counted(padded, name, tmp_path):
    world = World(tmp_path, padded=padded)
    assert answer_mismatch(world.credit, world.batch(1)) == {}, "the reward reports no answer"
    reported = np.array(["<eos>", "eos", "5", None, "EOS", ""], object)
    nested = np.array([{"reward_extra_info": {"pred": one}} for one in reported], object)
    world.others[name] = nested if name == "extra_fields" else reported
    assert answer_mismatch(world.credit, world.batch(2)) == {"oar/answer_mismatch": 2 / 5}
    batch = replace(world.batch(3), read=None)
    assert answer_mismatch(world.credit, batch) == {"oar/answer_mismatch_failed": 1.0}, "and training goes on"


def test_only_the_steps_that_were_asked_for_are_read_and_written(tmp_path):
    world = World(tmp_path, groups=1)
    metrics = [world.show(step) for step in range(1, 8)]
    assert world.files() == [f"step_00000{step}.jsonl" for step in (1, 3, 6)]
    assert len(world.asked) == 3 * 2
    assert [one["oar/dump_failed"] for one in metrics] == [0] * 7
    assert ["timing_s/oar_dump" in one for one in metrics] == [step in (1, 3, 6) for step in range(1, 8)]
    assert World(tmp_path, dir=None).show(3) == {}, "nothing is asked for"


def test_steps_after_the_one_that_a_run_resumed_from_are_no_longer_its_newest(tmp_path, caplog):
    world = World(tmp_path, groups=1)
    for step in (3, 6, 9):
        world.show(step)
    (world.folder / "step_of_mine.jsonl").write_text("")
    (world.folder / "step_000009.jsonl.discarded").write_text("older")
    world.restart()
    with caplog.at_level(logging.WARNING, "oar_plugin"):
        metrics = [world.show(step)["oar/dump_failed"] for step in (5, 6, 12, 9)]
    names = [f"step_0000{end}" for end in ("03.jsonl", "06.jsonl", "09.jsonl", "09.jsonl.discarded", "12.jsonl")]
    assert (metrics, world.files()) == ([0] * 4, [*names, "step_of_mine.jsonl"])
    assert (world.folder / names[3]).read_text() != "older"
    assert "1 files of steps after 6" in caplog.text


def test_what_nobody_computed_is_none(tmp_path):
    """In bypass mode there is no entropy; other data has no truth."""
    world = World(tmp_path, without=("entropy", "response_mask", "reward_model", "data_source"))
    world.show(1)
    row = world.lines(1)[1][0]
    assert (row.entropies, row.mask, row.truth, row.source, row.log_probs[0]) == (None, None, None, "", 0)


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["open", "replace", "decode", "no prompts"])
def test_what_fails_is_counted_said_once_and_leaves_no_half_file(tmp_path, monkeypatch, caplog, where):
    world = World(tmp_path, without=("prompts",) if where == "no prompts" else ())
    broken = {"open": (Path, full), "replace": (os, full), "decode": (TOKENIZER, lambda ids: 1 / 0)}
    if where in broken:
        monkeypatch.setattr(broken[where][0], where, broken[where][1])
    with caplog.at_level(logging.WARNING, "oar_plugin"):
        assert [world.show(step)["oar/dump_failed"] for step in (1, 2, 3)] == [1, 0, 1]
    (said,) = caplog.records
    assert "step 1" in said.getMessage()
    assert bool(said.exc_info) == (where in ("decode", "no prompts"))
    assert world.files() == []
    monkeypatch.undo()
    assert world.show(6)["oar/dump_failed"] == (where == "no prompts"), "it goes on where it can"


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OarConfigError, match=r"algorithm.oar.dump.dir=file/in: .*; allowed: a folder"):
        World(tmp_path, dir="file/in")
