"""`oar eval` without an engine: what a CHECKPOINT is, files of responses, grading, tables, wrong input."""

import errno
import fcntl
import json
import subprocess
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("math_verify")

from oar_plugin.cli.main import main
from oar_plugin.runs.evaluate import EvaluationError, checkpoints
from oar_plugin.runs.evaluate.checkpoints import find, fingerprint, parse
from oar_plugin.runs.evaluate.generate import ResponseFile, Sampling
from oar_plugin.runs.evaluate.grade import GeneratedResponse, Graded, grade, read
from oar_plugin.runs.evaluate.table import AVERAGE, as_markdown, as_rows, lines_of, metrics
from oar_plugin.runs.hub import NotOnHub
from oar_plugin.runs.math.pool import TaskCrashed
from tests.runs.evaluate import SAMPLING, problem_set

# ---- checkpoints


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


WEIGHTS = ("config.json", "model.safetensors")


@pytest.mark.parametrize(
    ("model", "others"),
    [
        (".", []),
        ("huggingface", []),
        ("actor/huggingface", []),
        ("actor/model/huggingface", ["actor/model/dist_ckpt/common.pt"]),
        ("actor/merged", ["actor/huggingface/config.json", "actor/fsdp_config.json"]),  # merged before
    ],
)
def test_the_model_of_a_checkpoint_is_found(model, others, tmp_path):
    touch(tmp_path, *others, *(f"{model}/{name}" for name in WEIGHTS))
    assert find(str(tmp_path), False, print) == str((tmp_path / model).resolve())


def test_of_a_runs_folder_the_last_complete_checkpoint_is_taken_or_the_best(tmp_path):
    for step in ("global_step_9", "global_step_10", "global_step_11", "best/global_step_9"):
        touch(tmp_path, *(f"{step}/actor/huggingface/{name}" for name in WEIGHTS))

    def found(best=False):
        return find(str(tmp_path), best, print).removeprefix(f"{tmp_path.resolve()}/").partition("/actor")[0]

    assert found() == "global_step_11"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")  # 11 is being written
    assert found() == "global_step_10"
    assert found(best=True) == "best/global_step_9"


def test_other_weights_tokenizers_and_settings_have_another_fingerprint(tmp_path):
    names = ("model.safetensors", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
    touch(tmp_path, "config.json", *names)
    seen = {fingerprint(str(tmp_path)), fingerprint(str(tmp_path))}
    for number, name in enumerate(names, start=1):
        assert len(seen) == number
        (tmp_path / name).write_text('{"a": 1}')
        seen.add(fingerprint(str(tmp_path)))
    assert len(seen) == 1 + len(names)
    assert fingerprint("Qwen/Qwen2.5-7B") == "Qwen/Qwen2.5-7B"


def refused(name):
    raise NotOnHub(name)


def test_a_folder_of_an_organisations_name_hides_no_model_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    monkeypatch.setattr(checkpoints, "cached", lambda name: None if name == "Qwen/Qwen2.5-7B" else refused(name))
    assert find("Qwen/Qwen2.5-7B", False, print) == "Qwen/Qwen2.5-7B"
    with pytest.raises(EvaluationError, match="neither a folder"):
        find("Qwen/global_step_7", False, print)


@pytest.mark.parametrize("other_is_first", [False, True])
def test_two_evaluations_may_merge_one_checkpoint(other_is_first, tmp_path, monkeypatch):
    def merge(words, **_):
        touch(Path(words[words.index("--target_dir") + 1]), *WEIGHTS)
        if other_is_first:
            touch(tmp_path / "actor" / "merged", *WEIGHTS, "first")
        return subprocess.CompletedProcess(words, 0, b"", b"")

    monkeypatch.setattr(checkpoints.subprocess, "run", merge)
    touch(tmp_path / "actor", "fsdp_config.json")
    assert find(str(tmp_path), False, print) == str(tmp_path / "actor" / "merged")
    assert (tmp_path / "actor" / "merged" / "first").exists() == other_is_first
    assert sorted(path.name for path in (tmp_path / "actor").iterdir()) == ["fsdp_config.json", "merged"]


def test_lines_have_names_and_seeds():
    words = ["oar=a,b", "runs/grpo", "runs/x/global_step_7/actor"]
    assert parse(words) == {"oar": ["a", "b"], "grpo": ["runs/grpo"], "x/global_step_7": ["runs/x/global_step_7/actor"]}


# ---- responses on disk


@pytest.fixture
def file(tmp_path):
    return ResponseFile(tmp_path, "org/model", SAMPLING, problem_set("1", "2"))


HOSTILE = ["", "\x00\n\\boxed{1}\x00", "\ud800 \u2028 \N{PILE OF POO}", '"}\n{"problem": 0']  # fmt: skip


def test_what_was_written_is_read_again_and_a_cut_last_line_is_made_anew(file, tmp_path):
    with file:
        for sample, text in enumerate(HOSTILE):
            file.add(GeneratedResponse(1, sample, text, False))
    whole = file.path.read_bytes()
    for cut in (1, 30):
        file.path.write_bytes(whole[:-cut])
        again = ResponseFile(tmp_path, "org/model", SAMPLING, problem_set("1", "2"))
        with again:
            assert [again.responses[1, sample].text for sample in range(3)] == HOSTILE[:3]
            assert (1, 3) not in again.responses
            again.add(GeneratedResponse(1, 3, HOSTILE[3], False))
        assert file.path.read_bytes() == whole


def test_other_settings_problems_and_models_have_a_file_of_their_own(file, tmp_path):
    others = (
        ("org/model", Sampling(0.6, 0.95, 9, 0), problem_set("1", "2")),
        ("org/model", SAMPLING, problem_set("1", "3")),
        ("org/other", SAMPLING, problem_set("1", "2")),
    )
    assert len({file.path, *(ResponseFile(tmp_path, *other).path for other in others)}) == 4


@pytest.mark.parametrize(
    ("content", "said"), [(b"{}\n", "line 1"), (b"\xff\n", "line 1"), (b'HEADER\n{"a": 1}\n', "line 2")]
)
def test_a_file_that_is_not_ours_is_refused_and_left_alone(content, said, file):
    content = content.replace(b"HEADER", json.dumps(file.header).encode())
    file.path.write_bytes(content)
    with pytest.raises(EvaluationError, match=said), file:
        pass
    assert file.path.read_bytes() == content


def test_two_evaluations_do_not_write_the_same_file_and_a_file_system_without_locks_is_no_obstacle(file, monkeypatch):
    def no_lock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    other = ResponseFile(file.path.parent, "org/model", SAMPLING, problem_set("1", "2"))
    with file, pytest.raises(EvaluationError, match="another oar eval"), other:
        pass
    monkeypatch.setattr(fcntl, "flock", no_lock)
    with file, other:
        assert file.path == other.path


# ---- grading


def test_responses_are_graded_by_the_reward_and_equal_answers_vote_together():
    texts = [
        [r"\boxed{\frac12}", r"\boxed{1/2}", r"\boxed{3}", ""],  # two spellings of one answer
        [r"\boxed{3}", r"\boxed{3}", "\x00", r"\boxed{" + "9" * 600 + "}"],
    ]
    given = [GeneratedResponse(p, s, text, s == 3) for p, row in enumerate(texts) for s, text in enumerate(row)]
    responses = {(one.problem, one.sample): one for one in given}
    found = grade(problem_set(r"\frac{1}{2}", "4"), responses, 4, lambda done, total: None)
    assert found.correct_PK.tolist() == [[True, True, False, False], [False] * 4]
    assert found.majority_P.tolist() == [1.0, 0.0]
    assert (found.no_answer, found.cut, found.failed) == (0.25, 0.25, 0.0)


@pytest.mark.parametrize(
    ("fails", "pool_works", "said"),
    [("2", True, None), ("12", True, "every comparison"), ("2", False, "no answers can be compared here: none")],
)
def test_comparisons_that_fail_are_counted_and_none_that_works_is_an_error(fails, pool_works, said, monkeypatch):
    class Pool:
        def run(self, function, *arguments):
            if not pool_works:
                raise TaskCrashed("none")
            return "name"

    def compare(name, text, truth, **_):
        return {"acc": 0.0, "failed": float(text[-2] in fails)}

    monkeypatch.setattr("oar_plugin.runs.evaluate.grade.start_pool", lambda *_: Pool())
    monkeypatch.setattr("oar_plugin.runs.evaluate.grade.compute_score", compare)
    responses = {(0, s): GeneratedResponse(0, s, rf"\boxed{{{answer}}}", False) for s, answer in enumerate("1112")}

    with pytest.raises(EvaluationError, match=said) if said else nullcontext():
        assert grade(problem_set("3"), responses, 4, lambda done, total: None).failed == 0.25


# ---- the table


def graded(*rows):
    correct = np.array(rows, dtype=bool)
    return Graded(correct, correct[:, 0].astype(float), 0.0, 0.0, 0.0)


def test_each_set_and_their_average_have_a_line_a_method_with_paired_differences():
    better, worse = graded([1, 1], [1, 0], [0, 1]), graded([1, 1], [0, 0], [0, 1])
    results = {"grpo": {"a": [worse], "b": [worse]}, "oar": {"a": [better], "b": [worse]}}
    lines = lines_of(results, "grpo", 2)
    of = {(line.data, line.method): line for line in lines}
    assert list(of) == [(name, method) for name in ("a", "b", AVERAGE) for method in results]
    assert of["a", "oar"].minus_baseline["avg@2"].mean == pytest.approx(0.5 / 3)
    assert of["b", "oar"].minus_baseline["avg@2"].mean == of["b", "oar"].minus_baseline["avg@2"].se == 0
    assert of[AVERAGE, "oar"].minus_baseline["avg@2"].mean == pytest.approx(0.5 / 6)
    assert of["a", "grpo"].minus_baseline == {}
    assert metrics(6) == ["avg@6", "pass@2", "pass@4", "pass@6", "maj@6"]
    text = as_markdown(as_rows(lines, "grpo", 2), lines)
    assert "|  | a (3) | b (3) | average (6) |" in text
    assert "| oar - grpo | +16.7 ± 16.7" in text
    assert "one seed of grpo, oar" in text


# ---- data and wrong input


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def row(truth):
    return {"prompt": [{"role": "user", "content": f"Say {truth}."}], "reward_model": {"ground_truth": truth}}


def test_repeated_problems_are_asked_once(tmp_path):
    write(tmp_path / "aime24" / "test.parquet", [row("1"), row("2")] * 8)
    assert read("aime24", tmp_path, None) == problem_set("1", "2", name="aime24")
    assert [problem.ground_truth for problem in read("aime24", tmp_path, 1).problems] == ["1"]
    assert read(str(tmp_path / "aime24" / "test.parquet"), tmp_path, None).name == "aime24"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("here --data aime24", 1, "oar data aime24 --out"),
        ("here --data strange.parquet", 1, "cannot read"),
        ("here --data none.parquet", 1, "no such file"),
        ("nowhere", 1, "neither a folder nor a name on the hub"),
        ("here/mistyped", 1, "neither a folder nor a name on the hub"),
        ("here", 1, "holds no model"),
        ("here --best", 1, "best/global_step_N"),
        ("a=here a=here", 2, "NAME=CHECKPOINT"),
        ("a=,here", 2, "NAME=CHECKPOINT"),
        ("here --baseline grpo", 2, "allowed: here"),
        ("here --temperature 0", 2, "--k 1"),
        ("here --temperature -1", 2, "at least 0"),
        ("here --top-p 0", 2, "above 0"),
        ("here --k 0", 2, "at least 1"),
        ("here --data ,", 2, "none of them empty"),
        ("here --data fine.parquet,other/fine.parquet", 2, "two sets are called fine"),
    ],
)
def test_wrong_input_is_named(words, status, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OAR_DATA", str(tmp_path / "data"))
    (tmp_path / "here").mkdir()
    write(tmp_path / "strange.parquet", [{"question": "?"}])
    for folder in (tmp_path, tmp_path / "other"):
        write(folder / "fine.parquet", [row("1")])
    monkeypatch.setattr(checkpoints, "cached", refused)
    words = words.split() if "--data" in words else [*words.split(), "--data", "fine.parquet"]
    try:
        found = main(["eval", *words])
    except SystemExit as exit_:
        found = exit_.code
    assert found == status
    assert said in capsys.readouterr().err


def test_the_table_is_printed_and_results_of_other_settings_are_kept(tmp_path, monkeypatch, capsys):
    def respond(model, sets, files, *_):
        for file in files:
            with file:
                file.add(GeneratedResponse(0, 0, r"\boxed{1}", False))

    monkeypatch.setattr("oar_plugin.runs.evaluate.generate.generate", respond)
    touch(tmp_path / "model", *WEIGHTS)
    write(tmp_path / "ours.parquet", [row("1")])
    out = tmp_path / "out"

    def evaluate(*words):
        asked = f"eval {tmp_path}/model --data {tmp_path}/ours.parquet --k 1 --out {out}".split()
        assert main([*asked, *words]) == 0
        shown, written = capsys.readouterr().out, (out / "table.md").read_text()
        cells = [word for line in written.splitlines() if line.startswith("| model") for word in line.split()[1::2]]
        assert cells
        assert [word for word in cells if word not in shown] == []
        return {path.name: path.read_text() for path in out.iterdir() if path.is_file()}

    first = evaluate()
    assert evaluate() == first, "the same again"
    second = evaluate("--top-p", "0.5")
    assert {name: second[name.replace(".", ".1.")] for name in first} == first
    assert len(second) == 4
    assert len(evaluate()) == 6
