"""`oar plan` projects a recipe's memory and hours, and what OAR adds, before it starts."""

import argparse
import os
import sys

from oar_plugin.cli.arguments import COMPOSING, number, share
from oar_plugin.output import say
from oar_plugin.runs.plan.known import ASSUMED, EXPECTED, GIB, GPUS, choose_gpu

_HELP = f"""\
Plan a recipe before it starts: memory of a GPU by phase, seconds that OAR adds, hours of the run, and whether it fits. Reads
verl's own files; starts nothing, needs no GPU, no network, no import of verl. Without verl this is enough, and changes nothing
that is installed: {COMPOSING}

example: oar plan qwen2_5_32b_megatron trainer.nnodes=8 --gpu H200-141
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.description = argparse.RawDescriptionHelpFormatter, _HELP
    add, default = parser.add_argument, "default: %(default)s"
    add("recipe", metavar="RECIPE", help="name of a recipe, or a folder with one")
    add("overrides", nargs="*", metavar="key=value", help="overrides, as on verl's command line")
    add("--variant", default="oar", choices=("oar", "grpo"), help=default)
    add("--gpu", default="H100-80", help=f"{', '.join(GPUS)}; {default}")
    add("--gpu-memory", type=number, metavar="GIB", help="GPU memory as CUDA reports it (default: that of the GPU)")
    add("--scored-share", type=share, default=ASSUMED.scored, help=f"share of responses with an advantage ({default})")


def run(args: argparse.Namespace) -> int:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    from oar_plugin.hosts.verl.settings import doubts
    from oar_plugin.runs.plan.planning import Plan, in_gib
    from oar_plugin.runs.recipe import compose_recipe, find_recipe

    config = compose_recipe(find_recipe(args.recipe), args.variant, args.overrides)
    plan = Plan(config, choose_gpu(args.gpu, args.gpu_memory), args.scored_share)
    for _, _, text in doubts(config, args.overrides):
        say(f"oar plan: {text}", sys.stderr)
    titles = "phase", "GiB of one GPU", "seconds", "share", "parts in GiB"
    shown = Table(*(Column(title, overflow="fold") for title in titles), box=box.SIMPLE_HEAD, show_edge=False)
    for phase in dict.fromkeys((*plan.memory, *plan.seconds)):
        parts = sorted(((size / GIB, part) for part, size in plan.memory.get(phase, {}).items()), reverse=True)
        text = ", ".join(f"{part} {size:.1f}" for size, part in parts if size > 0.05)
        gib, seconds = in_gib(plan.range[phase]) if parts else "", plan.seconds.get(phase, 0.0)
        shown.add_row(phase, gib, f"{seconds:.1f}", f"{seconds / plan.step:.1%}", text)
    shares = ", ".join(f"{name} {value:.0%}" for name, value in list(vars(EXPECTED).items())[:4])
    known = sys.stdout.isatty() or "COLUMNS" in os.environ  # a pipe or a file is wide enough for a row to be a line
    Console(width=None if known else 10_000, markup=False, emoji=False, highlight=False).print(shown)
    say(
        f"{plan.gpu.name} ({plan.gpu.memory_gib:g} GiB), {plan.gpus} GPUs, data parallel {plan.dp}. "
        f"{plan.model.name} ({plan.model.source}): {plan.parameters['base'] / 1e9:.2f}B parameters; an engine's cache holds "
        f"{plan.cached:.0f} of the longest sequences.\n"
        f"A step takes {plan.step:.1f} s, of which OAR {plan.oar:.1f} s: {plan.to_grpo:.2f} x the same step of GRPO, "
        f"with {plan.scored_share:.0%} of the responses scored (--scored-share).\n"
        f"{plan.summary}\n"
        f"By formula, not measured. Assumed: responses of {plan.mean_response:.0f} tokens, prompts of {plan.mean_prompt:.0f}; "
        f"shares of the datasheet: {shares}.\n"
        f"Verdict: {plan.verdict} ({plan.margin}).{'' if plan.verdict == 'fits' else f' For more memory, {plan.advice}.'}"
    )
    return 0 if plan.fits else 1
