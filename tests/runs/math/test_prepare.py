"""Data sets in the hub's schemas, read through the `datasets` library, become verl's rows in the files that recipes name."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

import oar_plugin.hosts.verl
from oar_plugin.cli.main import main
from oar_plugin.runs.math.sources import INSTRUCTION, SOURCES, DataError, load, prepare, problem_of, verl_row
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
        ("olympiadbench", {"question": "q", "final_answer": None}, "no answer"),
        ("dapo", {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "-3"}}, "-3"),
        # Of a row that cannot be used, the reason.
        ("gsm8k", {"question": "q", "answer": "no mark"}, "no answer"),
        ("math", {"problem": "q", "solution": "The answer is 5."}, "no answer"),
        ("aime24", {"problem": "q", "answer": None}, "no answer"),
        ("aime24", {"problem": " ", "answer": "1"}, "no question"),
    ],
)
def test_the_ground_truth_is_read_as_the_data_set_writes_it_or_it_is_said_why_not(name, raw, said):
    row = row_of(name, raw)
    assert (row if isinstance(row, str) else row["reward_model"]["ground_truth"]) == said


def test_the_same_problem_is_recognised_in_other_typesetting():
    texts = (r"Find $x$ if $x^2 = 4$.", "find \\(x\\) if \\(x^{2}=4\\)", r"Find $x$ if $x^2 = 9$.")
    one, same, other = (problem_of(row_of("math500", {"problem": text, "answer": "1"})) for text in texts)
    assert one == same != other


# Both forms in which DAPO's problems are on the hub: the authors' messages with their request, and the problem alone.
ASKED = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\nWhat is $x$?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


@pytest.mark.parametrize("prompt", [[{"role": "user", "content": ASKED}], "What is $x$?"])
def test_of_dapos_prompts_the_problem_is_kept_and_asked_as_ours_are(prompt):
    row = row_of("dapo", {"prompt": prompt, "reward_model": {"ground_truth": "1", "style": "rule"}})
    assert row["prompt"][0]["content"] == f"What is $x$? {INSTRUCTION}"


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
        "dapo": {"ground_truth": str(number), "style": "rule-lighteval/MATH_v2"},
    }.get(name, str(number))
    asked = [{"role": "user", "content": question}] if name == "dapo" else question
    return {source.question: asked, source.answer: answer, "level": "x"}


def copy_of(folder, rows, split="train"):
    """A folder in the place of the hub's repository."""
    write_lines(folder / f"{split}.jsonl", rows)
    return folder


def prepared(name, copy, out, decontaminate=False, repeats=()):
    (done,) = prepare([name], out, copy, decontaminate, dict(repeats))
    return done


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_the_command_writes_every_data_set_from_a_copy_and_says_what_it_did(name, tmp_path, capsys):
    for split in SOURCES[name].splits.values():
        copy_of(tmp_path / "copy", [a_row(name, number) for number in range(3)], split)
    command = ["data", name, "--from", str(tmp_path / "copy"), "--out", str(tmp_path)]
    assert main(command) == 0
    said = set(capsys.readouterr().out.split())
    for split in SOURCES[name].splits:
        file = tmp_path / name / f"{split}.parquet"
        rows = pq.read_table(file).to_pylist()
        assert truths(file) == ["0", "1", "2"]
        assert {(row["data_source"], row["extra_info"]["split"]) for row in rows} == {(name, split)}
        assert {name, split, "3"} <= said


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


def test_equal_rows_of_a_training_set_are_kept_once(tmp_path):
    done = prepared("dapo", copy_of(tmp_path / "copy", [a_row("dapo", number) for number in (1, 2, 1, 1)]), tmp_path)
    assert (truths(done.path), done.dropped) == (["1", "2"], {"a copy of another": 2})


def test_rows_without_an_answer_and_copies_are_dropped_and_a_test_set_is_repeated_on_request(tmp_path):
    rows = [a_row("aime24", 1)] * 3 + [{"problem": "q", "answer": ""}, {"problem": "r", "answer": r"\frac{"}]
    done = prepared("aime24", copy_of(tmp_path / "aime", rows), tmp_path, repeats={"aime24": 3})
    assert (truths(done.path), done.rows) == (["1", r"\frac{"] * 3, 2)
    assert done.dropped == {"a copy of another": 2, "no answer": 1}


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--list"], 0, "Hothan/OlympiadBench (OE_TO_maths_en_COMP) Apache-2.0 question, final_answer"),
        (["gsm9k"], 2, "did you mean gsm8k?"),
        ([], 2, "NAME is missing"),
        (["aime24", "--repeat", "amc23=2"], 2, "needs amc23 among the names"),
        (["aime24", "--repeat", "aime24=0"], 2, "aime24=0: must be NAME=N"),
    ],
)
def test_the_sets_are_listed_and_a_name_that_is_none_is_refused(words, status, said, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # one line for each set

    def run():
        sys.exit(main(["data", *words]))

    with pytest.raises(SystemExit) as exit_:
        run()
    assert exit_.value.code == status
    captured = capsys.readouterr()
    assert said in " ".join((captured.err if status else captured.out).split())


@pytest.mark.parametrize(("decontaminate", "kept"), [(False, ["1", "2"]), (True, ["2"])])
def test_training_rows_that_are_in_an_evaluation_set_are_counted_and_dropped_on_request(tmp_path, decontaminate, kept):
    out = tmp_path / "out"
    prepared("amc23", copy_of(tmp_path / "amc", [a_row("amc23", 1)], "test"), out)
    train = copy_of(tmp_path / "train", [a_row("deepmath", 1), a_row("deepmath", 2)])
    done = prepared("deepmath", train, out, decontaminate=decontaminate)
    assert (done.in_evaluation, truths(done.path)) == (1, kept)


@pytest.mark.parametrize(
    ("names", "file", "rows", "message"),
    [
        (["aime24"], "copy/train.jsonl", [{"question": "q", "answer": "1"}], "has no column problem"),
        (["aime24"], "copy/train.jsonl", [{"problem": "q", "answer": ""}], "no row is left"),
        (["aime24"], "copy", [{"problem": "q", "answer": "1"}], "--from .*copy: is not a folder"),
        (["gsm8k", "math"], "copy/gsm8k/test.jsonl", [{"question": "q", "answer": "#### 1"}], "math is missing"),
    ],
)
def test_a_copy_that_does_not_fit_is_refused_with_a_reason(tmp_path, names, file, rows, message):
    write_lines(tmp_path / file, rows)
    with pytest.raises(DataError, match=message):
        prepare(names, tmp_path / "out", tmp_path / "copy", False, {})
    assert not list(tmp_path.glob("out/aime24/*.parquet"))


def test_a_hub_that_cannot_be_reached_ends_in_advice(tmp_path, monkeypatch, capsys):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach 'math-ai/aime25' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert main(["data", "aime25", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    parts = ("Couldn't reach", "HF_ENDPOINT", "HF_HUB_OFFLINE", "--from", "hf download")
    assert [part for part in parts if part not in said] == []


@pytest.mark.skipif(not GSM8K_TRAIN.is_file(), reason="no GSM8K rows here")
def test_every_real_gsm8k_row_has_a_number_as_its_answer():
    for raw in read_lines(GSM8K_TRAIN):
        float(row_of("gsm8k", raw)["reward_model"]["ground_truth"])
