"""`oar plan`: what a recipe takes, before it is started."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

_HELP = """\
Say what a recipe takes before it is started: memory of a GPU by phase, arithmetic, communication and time of a step, what
OAR adds, and whether it fits. Reads the recipe's configuration as verl would; starts nothing, needs no GPU and no network.

How to read it: the phase in bold is the peak. "fits tightly" means less than 10 % of the memory left: fragmentation can take
that. Times come from the datasheet's figures times stated efficiencies; trust their shares more than their size.
"""

_EXAMPLES = """\
examples:
  oar plan recipes/qwen2_5_7b_math                                  on the cluster that the recipe names
  oar plan recipes/qwen2_5_7b_math --variant grpo                   the baseline
  oar plan recipes/qwen2_5_32b_megatron --gpus 64 --gpu H200-141    on another one
  oar plan recipes/qwen2_5_7b_math --gpu-memory 48 --tflops 360 --bandwidth 860
  oar plan recipes/qwen2_5_7b_math data.max_response_length=8192 actor_rollout_ref.rollout.max_model_len=9216
  oar plan --check                                                  formulas against small models on this machine

exit status: 0 it fits (tightly too), 1 it does not, 2 the configuration or an argument cannot work
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `oar plan` on `parser`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _HELP, _EXAMPLES
    parser.add_argument("recipe", nargs="?", type=Path, metavar="RECIPE", help="folder of a recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as on verl's command line")
    parser.add_argument("--variant", default="oar", choices=("oar", "grpo"), help="entry point (default: %(default)s)")
    parser.add_argument("--model", help="folder with a config.json or name, instead of actor_rollout_ref.model.path")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpus", type=int, help="of the trainer (default: trainer.nnodes x trainer.n_gpus_per_node)")
    cluster.add_argument("--gpus-per-node", type=int, help="default: trainer.n_gpus_per_node")
    cluster.add_argument("--gpu", help="A100-40, A100-80, L40S-48, H100-80 (default), H200-141, B200-180")
    cluster.add_argument("--gpu-memory", type=float, metavar="GIB", help="another memory, as CUDA reports it")
    cluster.add_argument("--tflops", type=float, help="another peak, dense bf16, 1e12 a second")
    cluster.add_argument("--bandwidth", type=float, metavar="GB/s", help="another memory bandwidth")
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--response-length", type=float, help="expected mean in tokens (default: half of data.max_response_length)"
    )
    work.add_argument(
        "--prompt-length", type=float, help="expected mean in tokens (default: a quarter of data.max_prompt_length)"
    )
    work.add_argument(
        "--scored-share",
        type=float,
        default=0.5,
        help="share of the responses whose advantage is not zero; only those get importance (default: %(default)s)",
    )
    check = parser.add_argument_group("check")
    check.add_argument(
        "--check",
        action="store_true",
        help="hold the formulas against counted and measured figures of small models; no RECIPE",
    )
    check.add_argument("--out", type=Path, metavar="DIR", help="with --check: write planner_cpu.md and .json there")


def run(args: argparse.Namespace) -> int:
    """Run `oar plan`; see the exit status in its help."""
    if args.check:
        return _run_check(args)
    if args.recipe is None:
        return _complain("name the folder of a recipe, such as recipes/qwen2_5_7b_math, or --check")
    if args.out is not None:
        return _complain("--out goes with --check; a plan is printed, and with --json can be redirected")
    return _run_plan(args)


def _run_plan(args: argparse.Namespace) -> int:
    from omegaconf import DictConfig
    from rich.console import Console

    from oar_plugin.hosts.verl.recipe import RecipeError, compose_recipe
    from oar_plugin.plan import LayoutError, Plan, ShapeError, choose_gpu, on_cluster, plan, report, suggest

    try:
        gpu = choose_gpu(args.gpu, args.gpu_memory, args.tflops, args.bandwidth)
        config = compose_recipe(args.recipe, args.variant, args.overrides)

        config = on_cluster(config, args.gpus, args.gpus_per_node)

        def planned(changed: DictConfig) -> Plan:
            return plan(
                changed,
                gpu=gpu,
                response_length=args.response_length,
                prompt_length=args.prompt_length,
                scored_share=args.scored_share,
                model=args.model,
            )

        made = planned(config)
        suggestions = suggest(config, made, planned)
    except (RecipeError, LayoutError, ShapeError, ValueError) as error:
        return _complain(str(error))
    if args.json:
        values = made.to_dict()
        values["suggestions"] = [
            {"overrides": s.overrides, "reason": s.reason, "headroom_bytes": s.plan.headroom} for s in suggestions
        ]
        print(json.dumps(values, indent=1))
    else:
        console = Console()
        for table in report.tables(made):
            console.print(table)
        for line in report.summary(made):
            console.print(line, markup=False, highlight=False)
        console.print()
        for line in report.assumptions(made):
            console.print(line, style="dim", markup=False, highlight=False)
        console.print()
        colour = {"fits": "green", "fits tightly": "yellow"}.get(made.verdict, "red")
        for number, line in enumerate(report.verdict_lines(made, suggestions)):
            console.print(
                line, style=f"bold {colour}" if number == 0 else None, markup=False, highlight=False, soft_wrap=True
            )
    return 0 if made.fits else 1


def _run_check(args: argparse.Namespace) -> int:
    from rich.console import Console

    from oar_plugin.plan import check

    if args.recipe is not None:
        return _complain(f"--check plans no recipe, but {args.recipe} was named: leave one of them out")
    console = Console()
    with console.status("building small models") as status:
        result = check.run_check(lambda what: status.update(what))
    console.print(check.table(result))
    for line in check.notes(result):
        console.print(line, markup=False, highlight=False)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "planner_cpu.md").write_text(check.markdown(result))
        (args.out / "planner_cpu.json").write_text(check.to_json(result) + "\n")
        console.print(f"written: {args.out / 'planner_cpu.md'}, {args.out / 'planner_cpu.json'}", markup=False)
    return 0 if result.passed else 1


def _complain(message: str) -> int:
    print(f"oar plan: {message}", file=sys.stderr)
    return 2
