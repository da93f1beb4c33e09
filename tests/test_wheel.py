"""The wheels, built from a copy of the checkout and installed where nothing of the checkout can be imported."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import oar_plugin
from tests.limits import PROCESS_S
from tests.page.dumped import write_dump
from tests.tracked import tracked

pytest.importorskip("build")
pytest.importorskip("verl")
pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[1]


def run(command, folder, **variables):
    hidden = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "OAR_CHECKPOINTS"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | variables
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PROCESS_S)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist of both packages, by the package's name; each wheel is made of its sdist."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    not_ours = (".*", "__pycache__", "*.egg-info", "results", "outputs", "build", "dist", "oar_demo")
    shutil.copytree(CHECKOUT, source, ignore=shutil.ignore_patterns(*not_ours), dirs_exist_ok=True)
    for folder in (source, source / "verl_cpu"):
        said = run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, folder], source)
        assert "warning" not in said.lower(), said
    run([sys.executable, "-m", "twine", "check", "--strict", *out.iterdir()], source)
    return {path.name.partition("-")[0] + path.suffix: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def oar(built, tmp_path_factory):
    environment, folder = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("empty")
    run([sys.executable, "-m", "venv", "--without-pip", environment], folder)
    python, wheels = environment / "bin" / "python", [built[f"{name}.whl"] for name in ("oar_plugin", "verl_cpu")]
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", *wheels], folder)
    # What the wheels depend on is here already. Paths that a .pth names are not searched for others: ours stay out.
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("oar_plugin", "verl_cpu"):
        found = run([python, "-c", f"import {name}; print({name}.__file__)"], folder).strip()
        assert Path(found) == site / name / "__init__.py"

    def call(*arguments, **variables):
        return run([environment / "bin" / "oar", *arguments], folder, **variables)

    call.folder = folder
    return call


def test_it_holds_the_package_and_the_recipes_alone(built):
    names = zipfile.ZipFile(built["oar_plugin.whl"]).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"oar_plugin"}
    recipes = {path.parent.name for path in CHECKOUT.glob("recipes/*/recipe.yaml")}
    wanted = {
        f"oar_plugin/recipes/{name}/{file}" for name in recipes for file in ("recipe.yaml", "oar.yaml", "README.md")
    }
    wanted |= {f"oar_plugin/{file.relative_to(CHECKOUT)}" for file in CHECKOUT.glob("recipes/cluster/*")}
    wanted |= {str(file.relative_to(CHECKOUT)) for file in tracked("oar_plugin/*")}
    assert wanted <= set(names)
    assert not [name for name in names if name.startswith("oar_plugin/recipes/") and name.endswith(".py")]
    assert not [name for name in names if "cpu" in name]


def test_the_cpu_stack_is_a_wheel_of_its_own(built):
    content = zipfile.ZipFile(built["verl_cpu.whl"])
    names = {name for name in content.namelist() if ".dist-info/" not in name}
    here = [*CHECKOUT.glob("verl_cpu/*.py"), *CHECKOUT.glob("verl_cpu/conf/**/*.yaml")]
    wanted = {str(file.relative_to(CHECKOUT)) for file in here} - {"verl_cpu/setup.py"}
    assert names == {*wanted, "verl_cpu/conf/__init__.py"}
    (listed,) = [content.read(name).decode() for name in content.namelist() if name.endswith("/entry_points.txt")]
    assert "[verl.plugins]\ncpu = verl_cpu.plugin" in listed


def test_its_metadata_is_complete_and_the_extra_cpu_has_the_requirements_of_the_cpu_stack(built):
    with zipfile.ZipFile(built["oar_plugin.whl"]) as content:
        (name,) = [name for name in content.namelist() if name.endswith("/METADATA")]
        lines = content.read(name).decode().splitlines()
        assert any(name.endswith("licenses/LICENSE") for name in content.namelist())
    assert {"Author: oar_plugin contributors", "License: Apache-2.0"} <= set(lines)
    assert {"Project-URL", "Keywords", "Classifier"} <= {line.split(":")[0] for line in lines}
    extras = {line.split()[1] for line in lines if line.startswith("Provides-Extra:")}
    assert extras == {"cpu", "megatron", "recipes", "trl", "swift", "benchmarks", "language", "dev", "docs"}
    wanted = [line for line in (CHECKOUT / "verl_cpu" / "requirements.txt").read_text().splitlines() if "=" in line]
    extra = [line for line in lines if line.startswith("Requires-Dist:") and 'extra == "cpu"' in line]
    assert len(extra) == len([line for line in wanted if not line.startswith("#")]) > 40
    with tarfile.open(built["oar_plugin.gz"]) as source:
        assert [name for name in source.getnames() if name.endswith("/verl_cpu/requirements.txt")]


def test_every_command_finds_what_it_needs(oar):
    assert oar("--version") == f"oar_plugin {oar_plugin.__version__}\n"
    assert "loaded by verl" in " ".join(oar("doctor", COLUMNS="200").split())
    (folder,) = re.findall("cp -r (.*)/NAME", oar("recipes"))
    assert Path(folder, "qwen2_5_7b_math", "recipe.yaml").exists()
    assert "fits" in oar("plan", "qwen2_5_7b_math")
    script = oar("launch", "qwen2_5_14b_deepmath", "--on", "slurm", "--dry-run", OAR_CHECKPOINTS="/shared/c")
    assert "#SBATCH --nodes=2" in script
    assert "oar_plugin/recipes/qwen2_5_14b_deepmath" in script
    write_dump(oar.folder, 3)
    assert "1 responses of steps 3" in oar("inspect", ".")
