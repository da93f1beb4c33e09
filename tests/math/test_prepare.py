"""Data sets in the hub's schemas, read through the `datasets` library, become the files that recipes name."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

import oar_plugin.hosts.verl
from oar_plugin.cli.main import main
from oar_plugin.math.prepare import DataError, load, prepare
from oar_plugin.math.sources import SOURCES
from tests.real_data import GSM8K_TEST, GSM8K_TRAIN

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return pq.read_table(path).to_pylist()


def truths(path):
    return [row["reward_model"]["ground_truth"] for row in read(path)]


def a_row(name, number):
    """A row in the columns of the hub."""
    source = SOURCES[name]
    answer = {"gsm8k": f"so\n#### {number}", "math": rf"so $\boxed{{{number}}}$"}.get(name, str(number))
    return {source.question: f"What is {number}?", source.answer: answer, **dict.fromkeys(source.extra, "x")}


def prepared(name, copy, out, limit=None, decontaminate=False):
    return prepare([name], out, copy, limit, decontaminate, lambda what, done, total: None)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_data_set_is_written_from_a_copy(name, tmp_path):
    for split in SOURCES[name].splits.values():
        write_lines(tmp_path / "copy" / f"{split}.jsonl", [a_row(name, number) for number in range(3)])
    done = prepared(name, tmp_path / "copy", tmp_path / "out")
    assert {part.split for part in done} == set(SOURCES[name].splits)
    for part in done:
        rows = read(part.path)
        assert truths(part.path) == ["0", "1", "2"]
        assert {row["data_source"] for row in rows} == {name}
        assert {row["extra_info"]["split"] for row in rows} == {part.split}
        assert part.rows == 3
        assert part.longest_prompt == len(rows[0]["prompt"][0]["content"])


def test_a_clone_of_the_hubs_repository_is_read_by_its_configuration(tmp_path):
    copy, configs, splits = tmp_path / "gsm8k", [], ("train", "test")
    for config, number in (("main", 1), ("socratic", 2)):
        (copy / config).mkdir(parents=True)
        for split in splits:
            table = pa.Table.from_pylist([a_row("gsm8k", number)])
            pq.write_table(table, copy / config / f"{split}-00000-of-00001.parquet")
        files = [{"split": split, "path": f"{config}/{split}-*"} for split in splits]
        configs.append({"config_name": config, "data_files": files})
    (copy / "README.md").write_text(f"---\n{OmegaConf.to_yaml({'configs': configs})}---\n# GSM8K\n")
    assert [row["answer"] for row in load("gsm8k", "train", copy, None)] == ["so\n#### 1"]


def test_files_stand_where_the_recipes_look_for_them(tmp_path):
    groups = Path(oar_plugin.hosts.verl.__file__).parent / "conf" / "recipe" / "data"
    written = {tmp_path / name / f"{split}.parquet" for name, source in SOURCES.items() for split in source.splits}
    for group in sorted(groups.glob("*.yaml")):
        config = OmegaConf.load(group)
        config.oar_data = str(tmp_path)
        named = {Path(file) for file in (*config.data.train_files, *config.data.val_files)}
        assert named <= written, group.name


def test_rows_without_an_answer_are_dropped_and_strange_answers_are_reported(tmp_path):
    rows = [a_row("aime24", 1), {"problem": "q", "answer": ""}, {"problem": "r", "answer": r"\frac{"}]
    (done,) = prepared("aime24", write_lines(tmp_path / "aime.jsonl", rows), tmp_path)
    assert done.rows == 2
    assert done.dropped == {"no answer": 1}
    assert done.unreadable == [r"\frac{"]


@pytest.mark.parametrize(("decontaminate", "kept"), [(False, ["1", "2"]), (True, ["2"])])
def test_training_rows_that_are_in_an_evaluation_set_are_counted_and_dropped_on_request(tmp_path, decontaminate, kept):
    out = tmp_path / "out"
    prepared("amc23", write_lines(tmp_path / "amc.jsonl", [a_row("amc23", 1)]), out)
    train = write_lines(tmp_path / "train.jsonl", [a_row("deepmath", 1), a_row("deepmath", 2)])
    (done,) = prepared("deepmath", train, out, decontaminate=decontaminate)
    assert done.in_evaluation == 1
    assert truths(done.path) == kept


def test_the_first_rows_on_request(tmp_path):
    file = write_lines(tmp_path / "aime.jsonl", [a_row("aime25", number) for number in range(5)])
    (done,) = prepared("aime25", file, tmp_path, limit=2)
    assert [row["extra_info"]["index"] for row in read(done.path)] == [0, 1]


@pytest.mark.parametrize(
    ("name", "file", "rows", "message"),
    [
        ("aime24", "a.jsonl", [{"question": "q", "answer": "1"}], "has no column problem"),
        ("gsm8k", "a.jsonl", [{"question": "q", "answer": "#### 1"}], "name a folder that holds both"),
        ("aime24", "a.csv", [], "must end in .parquet, .json, .jsonl"),
        ("aime24", "a.jsonl", [{"problem": "q", "answer": ""}], "no row is left"),
    ],
)
def test_a_copy_that_does_not_fit_is_refused_with_a_reason(tmp_path, name, file, rows, message):
    with pytest.raises(DataError, match=message):
        prepared(name, write_lines(tmp_path / file, rows), tmp_path / "out")
    assert not list(tmp_path.glob("out/**/*.parquet"))


def test_a_hub_that_cannot_be_reached_ends_in_advice(tmp_path, monkeypatch, capsys):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach 'math-ai/aime25' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert main(["data", "aime25", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    for part in ("Couldn't reach", "HF_ENDPOINT", "HF_HUB_OFFLINE", "--from", "hf download"):
        assert part in said


@pytest.mark.skipif(not GSM8K_TRAIN.is_file(), reason="no GSM8K rows here")
def test_the_command_prepares_real_rows_and_says_what_it_did(tmp_path, capsys):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file, split in ((GSM8K_TRAIN, "train"), (GSM8K_TEST, "test")):
        (copy / f"{split}.jsonl").write_bytes(file.read_bytes())
    assert main(["data", "gsm8k", "--from", str(copy), "--out", str(tmp_path / "out"), "--limit", "50"]) == 0
    said = capsys.readouterr().out
    assert "gsm8k" in said
    assert "50" in said
    assert len(read(tmp_path / "out" / "gsm8k" / "train.parquet")) == 50
