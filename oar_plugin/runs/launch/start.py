"""Makes of a run the command, script or manifest that starts it at a place, and starts it. ValueError: it cannot run there."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from oar_plugin.output import write_whole
from oar_plugin.runs.launch.job import by_name, facts, fill, patched
from oar_plugin.runs.launch.runs import Run
from oar_plugin.runs.recipe import command, recipes_folder

PROGRAMS = {"ray": "ssh", "slurm": "sbatch", "kubernetes": "kubectl"}
"""Place -> the program that it needs here."""
RESTARTS = 10  # of a SLURM job that fails, or whose folder cannot be seen
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Job(NamedTuple):
    """What starts a run: a command here, and the text of that command, of the script or of the manifest."""

    run: Run
    needs: str  # nodes and GPUs
    text: str
    words: list[str]

    def submit(self) -> int:
        """Hand the run to the scheduler, and return 0, or 1 where that failed."""
        if self.words[0] == "sbatch":
            write_whole(Path(self.words[-1]), self.text)
        return min(1, subprocess.run(self.words, input=self.text, text=True, check=False).returncode)

    def run_here(self) -> int:
        """Run to the end, end the run with this process, and return the exit status.

        The run gets a session of its own: a terminal would send Ctrl-C to it too, and the second signal would break off its
        cleaning up.
        """
        received: list[int] = []
        process: subprocess.Popen[bytes] | None = None

        def pass_on(number: int, frame: FrameType | None) -> None:
            received.append(number)
            if process is not None:
                process.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in ENDED_BY}
        try:
            process = subprocess.Popen(self.words, start_new_session=True)
            for number in received:
                process.send_signal(number)
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if received:
            raise KeyboardInterrupt
        return status


def in_container(on: str, options: Mapping[str, Any]) -> bool:
    """Return whether a run has an image of its own, and does not see the files of this machine."""
    return on == "kubernetes" or any(word.startswith("--container") for word in options.get("srun", ()))


def job_of(run: Run, recipe: Path, on: str, options: Mapping[str, Any], environment: Mapping[str, str]) -> Job:
    """Return what starts a run; `recipe` is its recipe's folder here, `environment` goes to every node."""
    there = options["recipe_on_nodes"] or recipe
    values = facts(run.config, there, run.variant, run.overrides)
    nodes, gpus, checkpoints = values["nodes"], values["gpus_per_node"], values["checkpoints"]
    needs = f"{nodes} node{'s' if nodes > 1 else ''} with {gpus} GPU{'s' if gpus > 1 else ''}"
    if on == "local":
        if nodes > 1:
            raise ValueError(f"--on local: the recipe needs {needs}; allowed: {', '.join(PROGRAMS)}")
        words = [sys.executable, *command(there, run.variant, run.overrides)[1:]]
        shown = shlex.join(["env", *(f"{name}={value}" for name, value in environment.items()), *words])
        return Job(run, needs, f"{shown}\n", words)
    if on == "ray" and not len(options["hosts"]) == len(set(options["hosts"])) == nodes:
        hosts = f"--hosts {','.join(options['hosts'])}: {len(set(options['hosts']))} different hosts"
        raise ValueError(f"{hosts}, the recipe needs {needs}")
    if on == "kubernetes":
        if not checkpoints.startswith(f"{(mount := options['mount'])}/"):
            where = f"set it to a folder in {mount}, with --env OAR_CHECKPOINTS={mount}/checkpoints"
            raise ValueError(f"trainer.default_local_dir={checkpoints}: not on the volume that all pods see; {where}")
        if there == recipe:
            if recipe.parent.resolve() != recipes_folder().resolve():
                raise ValueError(
                    f"{recipe}: a folder of this machine, which pods do not have; put it into the image or on the volume, and "
                    "name it there with --recipe-on-nodes"
                )
            values["train"] = by_name(values["train"], recipe)
    setup = options["setup"]
    if setup is None:
        here = sys.prefix == sys.base_prefix or in_container(on, options)
        setup = "" if here else f"source {shlex.quote(f'{sys.prefix}/bin/activate')}"
    values |= {**options, "name": run.job, "environment": environment, "setup": setup, "wait_s": options["wait"]}
    values |= {"job_h": options.get("max_time") or 24, "restarts": RESTARTS}
    text = fill(options["template"] or f"{on}.j2", values)
    if on == "ray":
        return Job(run, needs, text, ["bash", "-c", text])
    if on == "slurm":
        return Job(run, needs, text, ["sbatch", f"{run.job}.sbatch"])
    text = patched(text, options["patch"]) if options["patch"] else text
    return Job(
        run, needs, text, ["kubectl", "create", "-f", "-"]
    )  # not apply, which takes an existing RayJob for success
