"""Data sets in the hub's schemas, read through the `datasets` library, become verl's rows in the files that recipes name."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

import oar_plugin.hosts.verl
from oar_plugin.cli.main import main
from oar_plugin.runs.math.sources import INSTRUCTION, SOURCES, DataError, load, prepare, verl_row
from tests.real_data import GSM8K_TRAIN, read_lines

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


# ---- rows


def row_of(name, raw):
    return verl_row(name, "train", 7, raw)


def test_the_columns_are_verls_and_the_prompt_asks_for_a_box():
    row = row_of("deepmath", {"question": " How many? ", "final_answer": "3", "difficulty": 5.0})
    assert row == {
        "data_source": "deepmath",
        "prompt": [{"role": "user", "content": f"How many? {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 7, "split": "train"},
    }
    assert "\\boxed{}" in INSTRUCTION


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("gsm8k", {"question": "q", "answer": "48/2 = <<48/2=24>>24\n#### 1,024"}, "1024"),
        ("math", {"problem": "q", "solution": r"First $\boxed{1}$, then $\boxed{\frac{3}{4}}$."}, r"\frac{3}{4}"),
        ("math500", {"problem": "q", "answer": r"\left( 3, \frac{\pi}{2} \right)"}, r"\left( 3, \frac{\pi}{2} \right)"),
        ("aime24", {"problem": "q", "answer": "025"}, "025"),
        ("amc23", {"question": "q", "answer": 27.0}, "27.0"),
        ("minerva", {"question": "q", "answer": "4.5e33"}, "4.5e33"),
        ("olympiadbench", {"question": "q", "final_answer": [r"$\frac{1}{2}$"]}, r"\frac{1}{2}"),
        ("olympiadbench", {"question": "q", "final_answer": ["$2$", "-3"]}, "2, -3"),
        ("olympiadbench", {"question": "q", "final_answer": None}, None),
        # No row.
        ("gsm8k", {"question": "q", "answer": "no mark"}, None),
        ("math", {"problem": "q", "solution": "The answer is 5."}, None),
        ("aime24", {"problem": "q", "answer": None}, None),
        ("aime24", {"problem": " ", "answer": "1"}, None),
    ],
)
def test_the_ground_truth_is_read_as_the_data_set_writes_it(name, raw, said):
    row = row_of(name, raw)
    assert (row and row["reward_model"]["ground_truth"]) == said


# ---- files


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def truths(path):
    return [row["reward_model"]["ground_truth"] for row in pq.read_table(path).to_pylist()]


def a_row(name, number):
    """A row in the columns of the hub."""
    source, question = SOURCES[name], f"What is {number}?"
    answer = {
        "gsm8k": f"so\n#### {number}",
        "math": rf"so $\boxed{{{number}}}$",
        "olympiadbench": [f"${number}$"],
    }.get(name, str(number))
    return {source.question: question, source.answer: answer, "level": "x"}


def copy_of(folder, rows, split="train"):
    """A folder in the place of the hub's repository."""
    write_lines(folder / f"{split}.jsonl", rows)
    return folder


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_the_command_writes_every_data_set_from_a_copy_and_says_what_it_did(name, tmp_path, capsys):
    for split in SOURCES[name].splits.values():
        copy_of(tmp_path / "copy", [a_row(name, number) for number in range(3)], split)
    command = ["data", name, "--from", str(tmp_path / "copy"), "--out", str(tmp_path)]
    assert main(command) == 0
    said = capsys.readouterr().out
    for split in SOURCES[name].splits:
        file = tmp_path / name / f"{split}.parquet"
        rows = pq.read_table(file).to_pylist()
        assert truths(file) == ["0", "1", "2"]
        assert {(row["data_source"], row["extra_info"]["split"]) for row in rows} == {(name, split)}
        assert f"{file}: 3 rows of 3" in said


def test_a_clone_of_the_hubs_repository_is_read_by_its_configuration(tmp_path):
    copy, configs = tmp_path / "gsm8k", []
    for config, number in (("main", 1), ("socratic", 2)):
        (copy / config).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist([a_row("gsm8k", number)]), copy / config / "train-00000-of-00001.parquet")
        configs.append({"config_name": config, "data_files": [{"split": "train", "path": f"{config}/train-*"}]})
    (copy / "README.md").write_text(f"---\n{OmegaConf.to_yaml({'configs': configs})}---\n# GSM8K\n")
    assert [row["answer"] for row in load("gsm8k", "train", copy)] == ["so\n#### 1"]


def test_files_stand_where_the_recipes_look_for_them(tmp_path):
    written = {tmp_path / name / f"{split}.parquet" for name, source in SOURCES.items() for split in source.splits}
    for group in (Path(oar_plugin.hosts.verl.__file__).parent / "conf" / "recipe" / "data").glob("*.yaml"):
        config = OmegaConf.load(group)
        config.oar_data = str(tmp_path)
        trained_on = config.data.get("train_files", [])  # a group may build on another's
        assert {Path(file) for file in (*trained_on, *config.data.val_files)} <= written, group.name


def test_rows_without_an_answer_and_copies_are_dropped(tmp_path):
    rows = [a_row("aime24", 1)] * 3 + [
        {"problem": "q", "answer": ""},
        {"problem": "r", "answer": r"\frac{"},
        a_row("aime24", 1),
    ]
    assert prepare("aime24", "test", tmp_path, copy_of(tmp_path / "copy", rows)) == "2 rows of 6"
    assert truths(tmp_path / "aime24" / "test.parquet") == ["1", r"\frac{"]


def test_a_name_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["data", "gsm9k"])
    assert "choose from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "q", "answer": "1"}], "cannot read .*problem"),
        ([{"problem": "q", "answer": ""}], "no row of 1 has"),
        (None, "cannot read"),
    ],
)
def test_a_copy_that_does_not_fit_is_refused_with_a_reason(tmp_path, rows, message):
    if rows:
        copy_of(tmp_path / "copy", rows)
    with pytest.raises(DataError, match=message):
        prepare("aime24", "test", tmp_path / "out", tmp_path / "copy")
    assert not list(tmp_path.glob("out/aime24/*.parquet"))


def test_a_folder_of_copies_has_one_for_each_name(tmp_path):
    copy_of(tmp_path / "copies" / "aime24", [a_row("aime24", 1)])
    assert prepare("aime24", "test", tmp_path, tmp_path / "copies") == "1 rows of 1"


def test_a_hub_that_cannot_be_reached_ends_in_advice(tmp_path, monkeypatch, capsys):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach 'math-ai/aime25' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert main(["data", "aime25", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    parts = ("Couldn't reach", "HF_ENDPOINT", "--from", "hf download")
    assert [part for part in parts if part not in said] == []


@pytest.mark.skipif(not GSM8K_TRAIN.is_file(), reason="no GSM8K rows here")
def test_every_real_gsm8k_row_has_a_number_as_its_answer():
    for raw in read_lines(GSM8K_TRAIN):
        float(row_of("gsm8k", raw)["reward_model"]["ground_truth"])
