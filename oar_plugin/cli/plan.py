"""`oar plan` projects a recipe's memory and hours, and what OAR adds, before it starts."""

import argparse
import json
import sys

from oar_plugin.cli.arguments import missing_package, number, share
from oar_plugin.output import say
from oar_plugin.runs.plan.hardware import GIB, GPUS, SCORED, choose_gpu

_HELP = """\
Plan a recipe before it starts: memory of a GPU by phase, seconds that OAR adds, steps, hours and GPU-hours of the run, and
whether it fits. Composes the configuration from verl's own files; starts nothing, needs no GPU, no network, no import of verl.

examples:
  oar plan qwen2_5_7b_math                                          a recipe of `oar recipes`, on the cluster that it names
  oar plan qwen2_5_32b_megatron trainer.nnodes=8 --gpu H200-141     another cluster

exit status: 0 it fits (also if tightly), 1 it does not, 2 the configuration or an argument cannot work
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.description = argparse.RawDescriptionHelpFormatter, _HELP
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="name of a recipe, or a folder with one")
    add("overrides", nargs="*", metavar="key=value", help="overrides, as on verl's command line")
    add("--variant", default="oar", choices=("oar", "grpo"), help="default: %(default)s")
    add("--model", metavar="NAME", help="the model's name, as Qwen2.5-7B, if a folder is called otherwise")
    add("--gpu", default="H100-80", help=f"{', '.join(GPUS)}; default: %(default)s")
    add("--gpu-memory", type=number, metavar="GIB", help="GPU memory as CUDA reports it (default: that of the GPU)")
    add("--response-length", type=number, help="mean in tokens; default: half of data.max_response_length")
    text = "share of the generated responses with an advantage (default: %(default)s): the others get no importance, "
    add("--scored-share", type=share, default=SCORED, help=text + "or are generated again with algorithm.filter_groups")
    add("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        from oar_plugin.cli.tables import console, table
        from oar_plugin.runs.plan.planning import Plan, in_gib
        from oar_plugin.runs.recipe import compose_recipe, find_recipe

        overrides = [*args.overrides, *([f"actor_rollout_ref.model.path={args.model}"] if args.model else [])]
        config = compose_recipe(find_recipe(args.recipe), args.variant, overrides)
        made = Plan(config, choose_gpu(args.gpu, args.gpu_memory), args.response_length, args.scored_share)
    except ModuleNotFoundError as error:
        return missing_package("plan", error.name)
    except ValueError as error:
        say(f"oar plan: {error}", sys.stderr)
        return 2
    if args.json:
        print(json.dumps(made.to_dict(), indent=1))
        return 0 if made.fits else 1
    memory = table("memory of one GPU", "GiB", "parts in GiB")
    for phase, parts in made.memory.items():
        shown = sorted(((size / GIB, part) for part, size in parts.items() if size > GIB / 20), reverse=True)
        memory.add_row(phase, in_gib(made.range[phase]), ", ".join(f"{part} {size:.1f}" for size, part in shown))
    step = table(f"a step on {made.setup.gpus} GPU{'s' * (made.setup.gpus > 1)}", "PFLOPs in all", "seconds", "share")
    for phase, seconds in {**made.seconds, "step": made.step}.items():
        flops = made.flops.get(phase, 0.0) / 1e15
        step.add_row(phase, f"{flops:.1f}" if flops else "", f"{seconds:.1f}", f"{seconds / made.step:.1%}")
    out, colours = console(highlight=False), {"fits": "green", "fits tightly": "yellow"}
    out.print(memory, step)
    out.print(*made.sentences, sep="\n", soft_wrap=True)
    out.print(
        f"Verdict: {made.verdict} ({made.margin}).", style=f"bold {colours.get(made.verdict, 'red')}", soft_wrap=True
    )
    if made.verdict != "fits":
        out.print(f"For more free memory, {made.advice}.", soft_wrap=True)
    return 0 if made.fits else 1
