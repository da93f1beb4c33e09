"""Package metadata. Everything else about the build lives in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

# What the CPU build of vLLM needs and pip would not find by itself: that build is installed with
# --no-deps (see install.sh beside that file), because its own list names torchvision, torchaudio and torchcodec,
# which have no CPU build that goes with its torch.
CPU_REQUIREMENTS = Path(__file__).parent / "oar_plugin" / "hosts" / "verl" / "cpu" / "requirements.txt"


def lines(path: Path) -> list[str]:
    """The requirements in a file, without comments."""
    return [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]


setup(
    name="oar_plugin",
    version="0.1.0",
    description="Outcome-grounded Advantage Reshaping (OAR): token credit for GRPO as a verl plugin",
    long_description=Path(__file__).with_name("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["oar_plugin", "oar_plugin.*"]),
    package_data={
        "oar_plugin": [
            "py.typed",
            "hosts/verl/conf/**/*.yaml",
            "hosts/verl/cpu/*.txt",
            "hosts/verl/cpu/install.sh",
        ]
    },
    install_requires=[
        "torch>=2.6",
        "pydantic>=2.11,<3",
        "rich>=13,<16",
        "wrapt>=1.16,<3",
    ],
    extras_require={
        "cpu": lines(CPU_REQUIREMENTS),
        # The Megatron backend. Ranges that were tested, on a CPU; on GPUs bring TransformerEngine yourself, built for your
        # CUDA. mbridge is the weight converter of actor_rollout_ref.actor.megatron.vanilla_mbridge=True.
        "megatron": ["megatron-core>=0.16.1,<0.17", "mbridge>=0.15.1,<0.16"],
        # The recipes' reward and data. math-verify parses LaTeX with the version of antlr that Hydra needs.
        "recipes": [
            "math-verify[antlr4-9-3]>=0.9,<0.10",
            "pebble>=5.1,<6",
            "datasets>=4,<6",
            "pyyaml>=6,<7",
        ],
        "plots": ["matplotlib>=3.9,<4", "scipy>=1.11,<2"],
        "dev": [
            "pytest>=8,<10",
            "pytest-timeout>=2.3,<3",
            "pytest-xdist>=3.6,<4",
            "hypothesis>=6.100,<7",
            "ruff>=0.14,<1",
            "mypy>=1.18,<3",
        ],
    },
    entry_points={
        "console_scripts": ["oar = oar_plugin.cli.main:main"],
        "verl.plugins": ["oar = oar_plugin.hosts.verl.plugin"],
    },
)
