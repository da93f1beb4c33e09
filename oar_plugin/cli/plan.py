"""`oar plan` projects a recipe's memory and hours, and what OAR adds, before it starts."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from typing import TYPE_CHECKING

from oar_plugin.cli.arguments import missing_package, number, share
from oar_plugin.output import say
from oar_plugin.runs.plan.hardware import (
    EXPECTED,
    FRAGMENTATION,
    GATE_SECONDS_PER_TOKEN,
    GIB,
    GPUS,
    SCORED,
    WORKSPACES,
    choose_gpu,
)

if TYPE_CHECKING:
    from oar_plugin.runs.plan.planning import Plan

_HELP = """\
Plan a recipe before it starts: memory of a GPU by phase, seconds that OAR adds, steps, hours and GPU-hours of the run, and
whether it fits. Reads the configuration as verl would; starts nothing, needs no GPU, no network and no verl.

examples:
  oar plan qwen2_5_7b_math                                          a recipe of `oar recipes`, on the cluster that it names
  oar plan my_recipe --variant grpo                                 a folder; the baseline
  oar plan qwen2_5_32b_megatron trainer.nnodes=8 --gpu H200-141     another cluster

exit status: 0 it fits (also if tightly), 1 it does not, 2 the configuration or an argument cannot work
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.description = argparse.RawDescriptionHelpFormatter, _HELP
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="name of a recipe, or a folder with one")
    add("overrides", nargs="*", metavar="key=value", help="overrides, as on verl's command line")
    add("--variant", default="oar", choices=("oar", "grpo"), help="default: %(default)s")
    add("--model", metavar="DIR", help="folder with a config.json, instead of actor_rollout_ref.model.path")
    add("--gpu", default="H100-80", help=f"{', '.join(GPUS)}; default: %(default)s")
    add("--gpu-memory", type=number, metavar="GIB", help="GPU memory as CUDA reports it (default: that of the GPU)")
    add("--response-length", type=number, help="mean in tokens; default: half of data.max_response_length")
    add("--prompt-length", type=number, help="mean in tokens; default: a quarter of data.max_prompt_length")
    text = "share of the generated responses with an advantage (default: %(default)s): the others get no importance, "
    add("--scored-share", type=share, default=SCORED, help=text + "or are generated again with algorithm.filter_groups")
    add("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        from oar_plugin.runs.plan.planning import Plan
        from oar_plugin.runs.plan.setup import Expected
        from oar_plugin.runs.recipe import compose_recipe, find_recipe

        gpu = choose_gpu(args.gpu, args.gpu_memory)
        config = compose_recipe(find_recipe(args.recipe), args.variant, args.overrides)
        made = Plan(config, gpu, Expected(args.response_length, args.prompt_length, args.scored_share, args.model))
    except ModuleNotFoundError as error:
        return missing_package("plan", error.name)
    except ValueError as error:
        say(f"oar plan: {error}", sys.stderr)
        return 2
    if importlib.util.find_spec("verl") is None:
        say("oar plan: verl is not installed here; planned with the defaults of verl 0.9.1", sys.stderr)
    if args.json:
        print(json.dumps(made.to_dict(), indent=1))
    else:
        _print(made)
    return 0 if made.fits else 1


def _print(made: Plan) -> None:
    from oar_plugin.cli.tables import console, table
    from oar_plugin.runs.plan.planning import in_gib

    memory = table("memory of one GPU", "GiB", "parts in GiB")
    for phase, parts in made.memory.items():
        shown = sorted(((size / GIB, part) for part, size in parts.items() if size > GIB / 20), reverse=True)
        listed = ", ".join(f"{part} {size:.1f}" for size, part in shown)
        memory.add_row(phase, in_gib(made.range[phase]), listed)
    step = table(f"a step on {made.setup.gpus} GPU{'s' * (made.setup.gpus > 1)}", "PFLOPs in all", "seconds", "share")
    for phase, seconds in {**made.seconds, "step": made.step}.items():
        flops = made.flops.get(phase, 0.0) / 1e15
        step.add_row(phase, f"{flops:.1f}" if flops else "", f"{seconds:.1f}", f"{seconds / made.step:.1%}")
    out, s, oar = console(highlight=False), made.setup, "Without OAR."
    out.print(memory, step)
    if s.oar is not None:
        oar = f"OAR ({s.oar.importance}) adds {made.oar:.1f} s to a step: {made.to_grpo:.2f} x the same step of GRPO, with "
        oar += f"{s.scored_share:.0%} of the responses scored (--scored-share)."
    more = sum(s.rounds) / s.sequences
    filtered = f"algorithm.filter_groups generates {more:.1f} x a batch (--scored-share); " if more > 1 else ""
    for line in (
        f"{made.gpu.name} ({made.gpu.memory_gib:g} GiB), projected, not measured. {s.model.name}: "
        f"{s.parameters() / 1e9:.2f}B parameters, data parallel {s.dp}; an engine's cache holds "
        f"{made.cached:.0f} sequences of maximum length.",
        oar,
        made.summary,
        f"Assumed: responses of {s.mean_response:.0f} tokens on average (--response-length; the hours follow it), prompts of "
        f"{s.mean_prompt:.0f}; {filtered}and shares of the datasheet: {EXPECTED.training:.0%} of the arithmetic in training, "
        f"{EXPECTED.inference:.0%} in inference, {EXPECTED.decoding:.0%} of the memory's bandwidth, {EXPECTED.link:.0%} of "
        "the links. The range is from a very good run to an untuned one.",
        "Counted on tensors without data: FLOPs, and the memory of FSDP's passes. The upper bound of a range adds "
        f"{WORKSPACES / GIB:g} GiB for workspaces of libraries and {FRAGMENTATION:.0%} of temporary tensors for fragmentation. "
        f"Measured: the gate ({GATE_SECONDS_PER_TOKEN * 1e9:.0f} ns per token on a rank's core). No run on GPUs was measured.",
    ):
        out.print(line, soft_wrap=True)
    colour = {"fits": "green", "fits tightly": "yellow"}.get(made.verdict, "red")
    out.print(f"Verdict: {made.verdict} ({made.margin}).", style=f"bold {colour}", soft_wrap=True)
    if made.verdict != "fits":
        out.print(f"For more free memory, {made.advice}.", soft_wrap=True)
