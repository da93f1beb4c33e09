"""The promises of SECURITY.md: content of files is neither executed nor unpickled, and no write leaves the target folder."""

import ast
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from oar_plugin.cli.main import main
from oar_plugin.output import write_whole
from oar_plugin.page.dumps import Dumps
from oar_plugin.runs.evaluate.checkpoints import EvaluationError, find
from oar_plugin.runs.math.answer import _parse, final_answer
from oar_plugin.runs.math.sources import DataError, load
from oar_plugin.runs.run_folder import RunRefused, record_of
from tests.cli.test_inspect import model_folder as model_folder
from tests.hostile import PIECES, Bomb
from tests.page.dumped import HEADER, RESPONSE, write_dump

ROOT = Path(__file__).parents[1]
SECRET = "not to be written over\n"


# ---- the source


def calls():
    """Every call in the package: its file, the name of the called function, the syntax node."""
    for file in sorted((ROOT / "oar_plugin").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield file.relative_to(ROOT).as_posix(), ast.unparse(node.func), node


def test_models_are_loaded_without_the_code_in_their_folders():
    trusting = {}
    for file, name, node in calls():
        if name.endswith("from_pretrained") and not name.startswith("PeftModel"):  # an adapter's folder has no code
            trust = next((ast.unparse(word.value) for word in node.keywords if word.arg == "trust_remote_code"), None)
            trusting.setdefault(trust, set()).add(file)
    assert trusting.keys() == {"False", "True"}
    assert trusting["True"] == {"oar_plugin/hosts/openrlhf/settings.py"}, "OpenRLHF itself does"


def test_nothing_is_unpickled():
    unpickle = ("pickle.load", "pickle.loads", "torch.load", "np.load", "recv_pyobj", "read_pickle", "marshal.loads")
    assert [(file, name) for file, name, _ in calls() if name.endswith(unpickle)] == []


# ---- files that somebody else made


def code_of(made):
    return f"from pathlib import Path\nPath({str(made)!r}).touch()\n"


@pytest.mark.parametrize("carrier", ["tokenizer", "model", "weights"])
def test_a_model_folders_code_and_pickles_do_not_run(carrier, model_folder, tmp_path, monkeypatch, capsys):
    """Not even when a careless user answers the question at the terminal with yes."""
    folder, made = tmp_path / "model", tmp_path / "made"
    shutil.copytree(model_folder, folder)
    (folder / "mine.py").write_text(code_of(made))
    if carrier == "weights":
        (folder / "model.safetensors").unlink()
        torch.save({"lm_head.weight": Bomb(made)}, folder / "pytorch_model.bin")
    else:
        file = folder / ("tokenizer_config.json" if carrier == "tokenizer" else "config.json")
        config = json.loads(file.read_text())
        if carrier == "tokenizer":
            config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
        else:
            names = {name: f"mine.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")}
            config |= {"model_type": "mine", "auto_map": names}
        file.write_text(json.dumps(config))
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "#### 2"}))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    status = main(["inspect", str(tmp_path / "mine.jsonl"), "--model", str(folder)])
    assert status == 1 or carrier == "tokenizer"  # a tokenizer without its own class may still be one
    assert not made.exists()


def sharded(folder, model_folder, content):
    pytest.importorskip("verl")
    actor = folder / "global_step_1" / "actor"
    shutil.copytree(model_folder, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    torch.save(content, actor / "model_world_size_1_rank_0.pt")


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    dist.destroy_process_group()


@pytest.mark.slow
def test_shards_of_a_checkpoint_are_merged(model_folder, tmp_path, mesh):
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    as_fsdp2_has_it = {name: distribute_tensor(weight, mesh, [Shard(0)]) for name, weight in weights.items()}
    sharded(tmp_path, model_folder, as_fsdp2_has_it)

    merged = AutoModelForCausalLM.from_pretrained(find(str(tmp_path), print)).state_dict()
    assert all(torch.equal(merged[name].float(), weight.bfloat16().float()) for name, weight in weights.items())


@pytest.mark.slow
def test_shards_of_a_checkpoint_are_not_unpickled(model_folder, tmp_path):
    sharded(tmp_path, model_folder, {"more": Bomb(tmp_path / "made")})
    with pytest.raises(EvaluationError, match="weights_only"):
        find(str(tmp_path), print)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("brings", ["script", "pickle"])
def test_a_folder_of_data_brings_no_code(brings, tmp_path, monkeypatch):
    made, folder = tmp_path / "made", tmp_path / "data"
    folder.mkdir()
    if brings == "script":
        (folder / "data.py").write_text(code_of(made))
        (folder / "test.jsonl").write_text(json.dumps({"problem": "1+1?", "answer": "2"}))
    else:
        (folder / "test.pkl").write_bytes(pickle.dumps(Bomb(made)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="cannot read"):
        load("math500", "test", folder)
    assert not made.exists()


def test_records_of_runs_are_data(tmp_path):
    made = tmp_path / "made"
    (tmp_path / "run.yaml").write_text(f"state: finished\nsettings: !!python/object/apply:os.mkdir [{made}]\n")
    with pytest.raises(RunRefused):
        record_of(tmp_path)
    assert not made.exists()


@pytest.mark.parametrize(
    "text",
    [
        "__import__('pathlib').Path({!r}).touch()",
        "().__class__.__base__.__subclasses__()",
        "1+open({!r},'w')",
        "(1)(2)",
    ],
)
@pytest.mark.parametrize(
    "answer", ["\\boxed{{{}}}", "#### {}", "<answer>{}</answer>", "The answer is {}", "\\boxed{{${}$}}"]
)
def test_an_answer_is_not_evaluated_as_python(text, answer, tmp_path, monkeypatch):
    """sympy's parser calls eval. Only digits and operators reach it, no letter."""
    parser = pytest.importorskip("math_verify.parser")
    given, parse_expr = [], parser.parse_expr
    monkeypatch.setattr(parser, "parse_expr", lambda text, **more: (given.append(text), parse_expr(text, **more))[1])
    parser.parse_expr_cached.cache_clear()
    found = final_answer(answer.format(text.format(str(tmp_path / "made"))))
    assert found is not None
    _parse(found)
    assert [text for text in given if any(letter.isalpha() or letter in "_'\"" for letter in text)] == []
    assert not (tmp_path / "made").exists()


# ---- where files are written


def lead(folder, *names):
    """Put symbolic links with these names into `folder`, each to a file outside; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder.parent / f"outside{number}" for number in range(len(names))]
    for name, file in zip(names, files, strict=True):
        file.write_text(SECRET, encoding="utf-8")
        (folder / name).symlink_to(file)
    return files


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path):
    folder = tmp_path / "folder"
    outside = lead(folder, "page.html", ".page.html.unfinished")
    write_whole(folder / "page.html", "new")
    assert (folder / "page.html").read_text() == "new"
    assert not (folder / "page.html").is_symlink()
    assert [file.read_text() for file in outside] == [SECRET] * 2


def test_a_run_folder_is_not_written_through_links(tmp_path):
    from oar_plugin.runs import run_folder

    outside = lead(tmp_path / "run", run_folder.LOCK)
    config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path / "run"), "resume_mode": "auto"}})
    with pytest.raises(OSError, match="symbolic links"):
        run_folder.begin(config)
    assert [file.read_text() for file in outside] == [SECRET]


def test_a_page_is_not_written_through_links(tmp_path):
    dump = write_dump(tmp_path / "dump", 3)
    (outside,) = lead(dump, "inspect.html")
    assert main(["inspect", str(dump)]) == 0
    assert outside.read_text() == SECRET


def test_no_name_in_a_response_leads_out_of_the_dumps_folder(tmp_path):
    from oar_plugin.config import DumpConfig

    dumps = Dumps(DumpConfig(dir="dump"), tmp_path / "home")
    for step, piece in enumerate(PIECES, start=1):
        fields = dict.fromkeys(("group", "uid", "source", "prompt", "truth"), piece)
        dumps.write(HEADER, step, [type(RESPONSE)(**{**vars(RESPONSE), **fields})])
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {f"home/dump/step_{step:06d}.jsonl" for step in range(1, len(PIECES) + 1)}
