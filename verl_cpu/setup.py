"""Package metadata of verl_cpu, what an unmodified verl needs to train on a machine without a GPU."""

from setuptools import setup

setup(
    name="verl_cpu",
    version="0.1.0",
    description="An unmodified verl on a machine without a GPU: for demos, tests and CI",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    package_dir={"verl_cpu": "."},  # this folder is the package, so that a checkout needs no installation to import it
    packages=["verl_cpu", "verl_cpu.conf"],
    package_data={"verl_cpu": ["conf/**/*.yaml"]},
    install_requires=["wrapt>=1.16,<3"],
    entry_points={
        "verl.plugins": ["cpu = verl_cpu.plugin"],
        "oar_plugin.environments": ["cpu = verl_cpu.launch:cpu_environment"],  # for `oar launch`
    },
)
