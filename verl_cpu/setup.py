"""Package metadata of verl_cpu: stand-ins with which an unmodified verl trains on a machine without a GPU."""

from pathlib import Path

from setuptools import setup

setup(
    name="verl_cpu",
    version="0.1.0",
    description="An unmodified verl on a machine without a GPU: for demos, tests and CI",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    package_dir={"verl_cpu": "."},  # this folder is the package: a checkout can import it without an installation
    packages=["verl_cpu", "verl_cpu.conf"],
    package_data={"verl_cpu": ["conf/**/*.yaml"]},
    # torch, verl and vLLM are not named: pip must not choose a build of them. install.sh does.
    install_requires=["psutil>=5.9", "pyzmq>=25", "wrapt>=1.16,<3"],
    entry_points={
        "verl.plugins": ["cpu = verl_cpu.plugin"],
        "oar_plugin.environments": ["cpu = verl_cpu.launch:cpu_environment"],  # for `oar launch`
    },
)
