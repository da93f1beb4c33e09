"""`oar plan` projects a recipe's memory and hours, and what OAR adds, before it starts."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from oar_plugin.cli.arguments import COMPOSING, missing_package, number, share
from oar_plugin.output import say
from oar_plugin.runs.plan.hardware import EXPECTED, GIB, GPUS, SCORED, choose_gpu

if TYPE_CHECKING:
    from oar_plugin.runs.plan.planning import Plan

_HELP = f"""\
Plan a recipe before it starts: memory of a GPU by phase, seconds that OAR adds, hours of the run, and whether it fits. Reads
verl's own files; starts nothing, needs no GPU, no network, no import of verl. Without verl this is enough, and changes nothing
that is installed: {COMPOSING}

example: oar plan qwen2_5_32b_megatron trainer.nnodes=8 --gpu H200-141
exit status: 0 it fits (also if tightly), 1 it does not, 2 the configuration or an argument cannot work
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.description = argparse.RawDescriptionHelpFormatter, _HELP
    add, default = parser.add_argument, "default: %(default)s"
    add("recipe", metavar="RECIPE", help="name of a recipe, or a folder with one")
    add("overrides", nargs="*", metavar="key=value", help="overrides, as on verl's command line")
    add("--variant", default="oar", choices=("oar", "grpo"), help=default)
    add("--gpu", default="H100-80", help=f"{', '.join(GPUS)}; {default}")
    add("--gpu-memory", type=number, metavar="GIB", help="GPU memory as CUDA reports it (default: that of the GPU)")
    add("--response-length", type=number, help="mean in tokens; default: half of data.max_response_length")
    add("--scored-share", type=share, default=SCORED, help=f"share of responses with an advantage ({default})")


def run(args: argparse.Namespace) -> int:
    try:
        from oar_plugin.cli.tables import console, table
        from oar_plugin.runs.plan.planning import Plan, in_gib
        from oar_plugin.runs.recipe import compose_recipe, find_recipe

        config = compose_recipe(find_recipe(args.recipe), args.variant, args.overrides)
        if (args.response_length or 0) > (most := config.data.max_response_length):
            raise ValueError(f"--response-length {args.response_length:g}: must be at most {most}")
        made = Plan(config, choose_gpu(args.gpu, args.gpu_memory), args.response_length, args.scored_share)
    except ModuleNotFoundError as error:
        return missing_package("plan", error.name)
    except ValueError as error:
        say(f"oar plan: {error}", sys.stderr)
        return 2
    shown = table("phase", "GiB of one GPU", "seconds", "share", "parts in GiB")
    for phase in dict.fromkeys((*made.memory, *made.seconds)):
        parts = sorted(((size / GIB, part) for part, size in made.memory.get(phase, {}).items()), reverse=True)
        text = ", ".join(f"{part} {size:.1f}" for size, part in parts if size > 0.05)
        gib, seconds = in_gib(made.range[phase]) if parts else "", made.seconds.get(phase, 0.0)
        shown.add_row(phase, gib, f"{seconds:.1f}", f"{seconds / made.step:.1%}", text)
    out = console(highlight=False)
    out.print(shown)
    out.print(*sentences(made), sep="\n", soft_wrap=True)
    return 0 if made.fits else 1


def sentences(plan: Plan) -> list[str]:
    """Return what is projected and assumed, and the verdict with what to try."""
    shares = ", ".join(f"{name} {value:.0%}" for name, value in list(EXPECTED._asdict().items())[:4])
    adds = f"OAR ({plan.settings.importance}) adds {plan.oar:.1f} s: " if plan.settings else ""
    return [
        f"{plan.gpu.name} ({plan.gpu.memory_gib:g} GiB), projected, not measured. {plan.model.name}: "
        f"{plan.parameters['base'] / 1e9:.2f}B parameters on {plan.gpus} GPUs, data parallel {plan.dp}; an engine's cache "
        f"holds {plan.cached:.0f} sequences of maximum length.",
        f"A step takes {plan.step:.1f} s. {adds}{plan.to_grpo:.2f} x the same step of GRPO, "
        f"with {plan.scored_share:.0%} of the responses scored (--scored-share).",
        plan.summary,
        f"Assumed: responses of {plan.mean_response:.0f} tokens (--response-length), prompts of {plan.mean_prompt:.0f}; "
        f"shares of the datasheet: {shares}. No run on GPUs was measured.",
        f"Verdict: {plan.verdict} ({plan.margin}).{'' if plan.verdict == 'fits' else f' For more memory, {plan.advice}.'}",
    ]
