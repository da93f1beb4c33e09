"""`oar recipes` lists what is there, and copies one."""

from pathlib import Path

from oar_plugin.cli.main import main
from oar_plugin.hosts.verl.recipe import find_recipe, recipe_names


def test_it_lists_every_recipe_by_its_whole_name(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipes"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert set(recipe_names()) <= listed


def test_a_copy_is_a_recipe_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "qwen2_5_7b_math", "mine"]) == 0
    assert "oar launch mine" in capsys.readouterr().out
    assert find_recipe("mine") == tmp_path / "mine"
    original = {path.name: path.read_bytes() for path in find_recipe("qwen2_5_7b_math").iterdir()}
    assert {path.name: path.read_bytes() for path in Path("mine").iterdir()} == original
    assert main(["recipes", "copy", "qwen2_5_1_5b_math", "mine"]) == 2
    assert "mine exists" in capsys.readouterr().err
    assert (tmp_path / "mine" / "recipe.yaml").read_bytes() == original["recipe.yaml"]


def test_the_templates_of_launch_can_be_copied(tmp_path):
    assert main(["recipes", "copy", "cluster", str(tmp_path / "cluster")]) == 0
    assert {path.name for path in (tmp_path / "cluster").iterdir()} == {"ray.j2", "slurm.j2", "kubernetes.j2"}


def test_a_name_that_is_no_recipe_is_refused_with_those_that_are(tmp_path, capsys):
    assert main(["recipes", "copy", "cpu_demo", str(tmp_path / "x")]) == 2
    assert "cpu_demo: neither a folder nor a recipe; recipes: qwen2_5_14b_deepmath," in capsys.readouterr().err
