"""`oar smoke`: try a recipe on this machine before it costs GPUs."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

_HELP = """\
Run a recipe for two steps on a CPU: the recipe's own yaml, real verl, real Ray, real vLLM, with a tiny model and tiny sizes in
place of the large ones (config group cpu_smoke). It shows that recipe, overrides and installation fit together, not
how the model learns. About two minutes; needs the extra [cpu] (see recipes/cpu_demo).

What is replaced: the model and the data; batch and response lengths; the number of nodes and GPUs; Megatron's parallel sizes
(tensor parallel over two processes); Ulysses (off); NCCL by gloo and sockets; the distributed optimizer by the ordinary one.
"""

_EXAMPLES = """\
examples:
  oar smoke recipes/qwen2_5_7b_math
  oar smoke recipes/qwen2_5_7b_math --variant grpo
  oar smoke recipes/qwen2_5_7b_math algorithm.oar.tau=0.5 reward.custom_reward_function.path=my_reward.py
"""

SHOWN = {
    "critic/score/mean": "mean reward",
    "oar/scored": "share of responses scored",
    "oar/answer_found": "share of responses with an answer",
    "oar/fallback/any": "share that fell back to plain GRPO",
    "oar/ess_ratio": "effective sample size of the weights",
    "actor/grad_norm": "gradient norm",
    "timing_s/step": "seconds",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `oar smoke` on `parser`."""
    parser.description, parser.epilog = _HELP, _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", type=Path, help="folder of the recipe")
    parser.add_argument("--variant", choices=("oar", "grpo"), default="oar", help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, help="folder for the model, the log and the metrics (default: a temporary one)"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", help="for verl, such as algorithm.oar.tau=0.5")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 when both steps ran, 1 when the run failed, 2 for a recipe that does not compose."""
    from oar_plugin.hosts.verl.cpu.smoke import SmokeFailed, run_smoke
    from oar_plugin.hosts.verl.recipe import RecipeError

    console = Console()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="oar_smoke_"))
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    try:
        with console.status(f"two steps of {arguments.recipe.name} on this machine, log in {folder / 'verl.log'}"):
            steps = run_smoke(
                arguments.recipe, folder.resolve(), arguments.variant, arguments.overrides, arguments.timeout
            )
    except RecipeError as error:
        print(f"oar: {error}", file=sys.stderr)
        return 2
    except SmokeFailed as error:
        print(f"oar: {error}", file=sys.stderr)
        return 1
    table = Table("", *(f"step {step['step']}" for step in steps))
    for name, title in SHOWN.items():
        if any(name in step for step in steps):
            table.add_row(title, *(f"{step[name]:.3g}" if name in step else "" for step in steps))
    console.print(table)
    console.print(
        f"{arguments.recipe.name}/{arguments.variant}.yaml ran, {time.monotonic() - start:.0f} s; all metrics: {folder}"
    )
    return 0
