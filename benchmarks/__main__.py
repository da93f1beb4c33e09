"""python -m benchmarks STUDY [--help]: measure on this machine, print what was found, write a page with --out DIR."""

import importlib
import shlex
import sys
import traceback
from functools import partial

INSTALL = "`pip install -e '.[benchmarks]'` in a checkout installs what the studies need"
try:
    import torch
    import tyro
    from rich.console import Console
    from rich.status import Status

    from benchmarks.machine import choose_device, describe_machine, load_average
except ModuleNotFoundError as error:
    sys.exit(f"benchmarks: {error.name} is not installed; {INSTALL}")

STUDIES = {
    "count": "FLOPs, memory and collectives of a step of models that do not fit here, on tensors without data",
    "run": "what OAR costs in whole runs of verl, GRPO's steps and OAR's in turn",
    "real": "real runs with SmolLM2, GRPO's and OAR's on the same seeds",
    "scaling": "GRPO's and OAR's step over data, tensor, pipeline, sequence and context parallel sizes",
    "fidelity": "how well each importance agrees with exact OAR-P and with tokens that are known to be causal",
    "labels": "how many exact scores predicted OAR-P needs, and what stands in the masked place",
    "learning": "how fast small models learn with each importance, beside GRPO, random credit and an oracle",
}
"""Each is a package with a docstring for its help, and a module `study` with `Settings`, their `check`, and `measure`."""


def usage() -> str:
    lines = [__doc__ or "", "", *(f"  {name:<10}{summary}" for name, summary in STUDIES.items())]
    return "\n".join([*lines, "", "examples:", "  python -m benchmarks fidelity --models 1 --responses 16"])


def main(arguments: list[str]) -> int:
    """Returns 0, 1 where the measurement failed, 2 for arguments that cannot work."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in STUDIES:
        print(f"benchmarks: there is no study {name!r}; allowed: {', '.join(STUDIES)}", file=sys.stderr)
        return 2
    try:
        package, study = (importlib.import_module(f"benchmarks.{module}") for module in (name, f"{name}.study"))
    except ModuleNotFoundError as error:
        sys.exit(f"benchmarks {name}: {error.name} is not installed; {INSTALL}")
    settings = tyro.cli(study.Settings, prog=f"python -m benchmarks {name}", description=package.__doc__, args=rest)
    console = Console()
    try:
        settings.check()
        torch.set_num_threads(getattr(settings, "threads", torch.get_num_threads()))
        machine = describe_machine(choose_device(getattr(settings, "device", "cpu")))
        with console.status("") as status:
            report = study.measure(settings, partial(show_progress, status))
    except (ValueError, RuntimeError) as error:
        if not raised_here(error):
            raise
        Console(stderr=True).print(f"benchmarks {name}: {error}", style="red", markup=False, highlight=False)
        return 2 if isinstance(error, ValueError) else 1
    if isinstance(report, str):  # a study that was asked for a text only
        print(report)
        return 0
    report.command = shlex.join(["python", "-m", "benchmarks", *arguments])
    if report.machine is not None:
        report.machine = machine | {"load_average_after": load_average()} | report.machine
    report.show(console)
    if settings.out is not None:
        for path in report.write(settings.out):
            console.print(f"written: {path}", markup=False, soft_wrap=True)
    return int(report.failed)


def raised_here(error: Exception) -> bool:
    """Whether a study says this itself. A fault inside of a library needs its traceback."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).partition(".")[0] in ("benchmarks", "oar_plugin")


def show_progress(status: Status, what: str, done: int | None = None, of: int | None = None) -> None:
    status.update(what if of is None else f"{what} ({done} of {of})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
