"""Data sets in the hub's schemas, read through the `datasets` library, become verl's rows in the files that recipes name."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

import oar_plugin.hosts.verl
from oar_plugin.cli.main import main
from oar_plugin.runs.math.sources import INSTRUCTION, SOURCES, DataError, load, prepare, verl_row

datasets = pytest.importorskip("datasets")
CASES = json.loads((Path(__file__).parents[1] / "rows.json").read_text("utf-8"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(("name", "raw", "asked", "truth"), CASES["hub"])
def test_a_row_is_read_as_its_data_set_means_it_or_refused(name, raw, asked, truth):
    if isinstance(asked, str):
        with pytest.raises(DataError, match=re.escape(asked)):
            verl_row(name, "test", 7, raw)
    elif row := verl_row(name, "test", 7, raw):
        prompt = row.pop("prompt")
        more = {"ability": "math", "extra_info": {"index": 7, "split": "test"}}
        assert row == {"data_source": name, "reward_model": {"style": "rule", "ground_truth": truth}, **more}
        assert " | ".join(each["content"] for each in prompt) == f"{' | '.join(asked)} {INSTRUCTION}"
        assert (prompt[-1]["role"], "\\boxed{}" in INSTRUCTION) == ("user", True)
    else:
        assert (asked, truth) == ([], None)


def truths(path):
    return [row["reward_model"]["ground_truth"] for row in pq.read_table(path).to_pylist()]


def a_row(name, number):
    source, question = SOURCES[name], f"What is {number}?"
    answers = {"gsm8k": f"so\n#### {number}", "math": rf"so $\boxed{{{number}}}$", "olympiadbench": [f"${number}$"]}
    return {source.question: question, source.answer: answers.get(name, str(number)), "level": "x"}


def copy_of(folder, rows, split="train"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_the_command_writes_every_data_set_from_a_copy_and_says_what_it_did(name, tmp_path, capsys):
    for split in SOURCES[name].splits.values():
        copy_of(tmp_path / "copy", [a_row(name, number) for number in range(3)], split)
    assert main(["data", name, "--from", str(tmp_path / "copy"), "--out", str(tmp_path)]) == 0
    files = [tmp_path / name / f"{split}.parquet" for split in SOURCES[name].splits]
    assert capsys.readouterr().out.splitlines() == [f"{file}: 3 rows of 3" for file in files]
    assert [truths(file) for file in files] == [["0", "1", "2"]] * len(files)


@pytest.mark.parametrize("home", [None, "gone", "file"])
def test_without_a_home_folder_a_sentence_says_so_and_out_works(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.delenv("OAR_DATA", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", str(tmp_path / home))
    words = ["data", "aime24", "--from", str(copy_of(tmp_path / "copy", [a_row("aime24", 1)]))]
    assert main(words) == 1
    assert re.match(r"oar data: .* no home folder .*OAR_DATA.*--out names another folder\n\Z", capsys.readouterr().err)
    assert main([*words, "--out", str(tmp_path / "out")]) == 0


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
    rows = [
        a_row("aime24", 1),
        {"problem": "q", "answer": ""},
        {"problem": "r", "answer": r"\frac{"},
        a_row("aime24", 1),
    ]
    copy_of(tmp_path / "copies" / "aime24", rows)
    assert prepare("aime24", "test", tmp_path, tmp_path / "copies") == "2 rows of 4"
    assert truths(tmp_path / "aime24" / "test.parquet") == ["1", r"\frac{"]


@pytest.mark.parametrize(("content", "message"), CASES["broken"])
def test_a_broken_file_of_a_copy_is_named_with_its_line(content, message, tmp_path):
    (tmp_path / "test.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=re.escape(message)) as error:
        load("aime24", "test", tmp_path)
    assert str(tmp_path / "test.jsonl") in str(error.value)


def test_a_split_of_a_copy_has_the_hubs_name_or_ours(tmp_path):
    for split, number in (("test", 1), ("train", 2)):  # the hub's aime24 has only `train`
        copy = copy_of(tmp_path / "copy", [a_row("aime24", number)], split)
        assert [row["answer"] for row in load("aime24", "test", copy)] == [str(number)]
    with pytest.raises(DataError, match=r"Unknown split.*needed: the split test, with columns problem and answer"):
        load("math500", "test", copy_of(tmp_path / "other", [a_row("math500", 1)], "train"))


@pytest.mark.parametrize(("question", "message"), [("question", "cannot read .*problem"), ("problem", "no row of 1")])
def test_a_copy_that_does_not_fit_is_refused_with_a_reason(tmp_path, question, message):
    with pytest.raises(DataError, match=message):
        prepare("aime24", "test", tmp_path / "out", copy_of(tmp_path / "copy", [{question: "q", "answer": ""}]))
    assert not list(tmp_path.glob("out/aime24/*.parquet"))
