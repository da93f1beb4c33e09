"""Run a recipe for two steps on a CPU: its own yaml, real verl, Ray and vLLM, with a tiny model and tiny sizes.

    python recipes/smoke.py recipes/qwen2_5_7b_math
    python recipes/smoke.py recipes/qwen2_5_7b_math --variant grpo
    python recipes/smoke.py recipes/qwen2_5_7b_math algorithm.oar.tau=0.5 reward.custom_reward_function.path=my_reward.py

It shows that recipe, overrides and installation fit together, not how the model learns. It takes about two minutes, in an
environment that verl_cpu/install.sh made. The config group cpu_smoke replaces the model and the data; batch and response
lengths; the number of nodes and GPUs; Megatron's parallel sizes (tensor parallel over two processes); Ulysses (off); NCCL
(gloo and sockets); the distributed optimizer (the ordinary one). On a machine with GPUs it replaces only model, data and
lengths; override nodes, GPUs and parallel sizes yourself.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds the checkout's own benchmarks

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

import verl_cpu
from benchmarks.tiny.data import write_problems
from benchmarks.tiny.model import Architecture, build_model
from benchmarks.tiny.tasks import Chain
from benchmarks.tiny.verl_run import read_metrics
from benchmarks.tiny.warm_start import WarmStart, train
from benchmarks.tiny.words import make_tokenizer
from oar_plugin.runs.recipe import RecipeError, compose_recipe, entry_point, find_recipe
from verl_cpu import wanted
from verl_cpu.launch import cpu_environment
from verl_cpu.session import TIMED_OUT, run_verl

SHOWN = {
    "critic/score/mean": "mean reward",
    "oar/scored": "share of responses scored",
    "oar/answer_found": "share of responses with an answer",
    "oar/fallback/any": "share that fell back to plain GRPO",
    "oar/ess_ratio": "effective sample size of the weights",
    "actor/grad_norm": "gradient norm",
    "timing_s/step": "seconds",
}
MAIN = "verl.trainer.main_ppo"
EXPERIMENTAL = {
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async",
}
"""verl's programs besides `MAIN`, and their sizes."""

VOCABULARY = 384
"""Words and bytes: a recipe's prompt may have any text. Even, because layouts split the vocabulary."""


CONFIG_GROUPS = Path(verl_cpu.__file__).parent / "conf"


class SmokeFailed(RuntimeError):
    """The run failed. The message says where the log is, and how it ends."""


def group_of(config: DictConfig, module: str = MAIN) -> str:
    """Return which of `verl_cpu/conf/cpu_smoke/*.yaml` fits a recipe and one of verl's programs."""
    if module in EXPERIMENTAL:
        return EXPERIMENTAL[module]
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode", default="sync"))  # verl 0.8 has no such key
    if config.actor_rollout_ref.actor.strategy == "megatron":
        return "megatron"
    if mode == "sync":
        return "filtered" if config.algorithm.filter_groups.enable else "dp"
    return mode


def architecture_of(model: str) -> Architecture:
    """Return the architecture that a model's name says; an unknown name counts as a dense Qwen."""
    name = model.lower()
    if "a3b" in name or "moe" in name:
        return "qwen3_moe"
    return "llama" if "yi-" in name or "llama" in name else "qwen2"


def make_assets(folder: Path, filler: tuple[int, int] = (2, 5), architecture: Architecture = "qwen2") -> None:
    """Write `model/`, trained for about ten seconds, and `data.parquet`.

    The model's responses are partly right and partly wrong; each has an answer, and one token decides it. `filler` is the
    smallest and the largest number of words that a response begins with.
    """
    task = Chain("smoke", steps=1, filler=filler, error_rate=0.3)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    experts["norm_topk_prob"] = True  # as Qwen's models have it: Megatron's bridges do not read the key
    more = experts if architecture == "qwen3_moe" else {}
    model = build_model(0, heads=2, architecture=architecture, vocab=VOCABULARY, tied=False, **more)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster than two at this size
    train(model, task, 0, WarmStart(short_steps=400, full_steps=100))
    torch.set_num_threads(threads)
    model.save_pretrained(folder / "model")
    make_tokenizer(VOCABULARY).save_pretrained(folder / "model")
    write_problems(folder / "data.parquet", list(itertools.islice(task.problems(0), 64)))


def sizes(recipe: Path, variant: str, group: str) -> list[str]:
    """Return words for verl's command line: the recipe with the sizes of a smoke test."""
    # On a machine with GPUs verl_cpu adds no config groups, and Hydra would take the last word for a new key.
    return [*entry_point(recipe, variant), "--config-dir", str(CONFIG_GROUPS), f"+cpu_smoke={group}"]


def run_smoke(
    recipe: Path,
    folder: Path,
    variant: str = "oar",
    overrides: Sequence[str] = (),
    timeout_s: float = 600.0,
    module: str = MAIN,
) -> list[dict[str, Any]]:
    """Run a recipe for two steps.

    Args:
        recipe: folder of the recipe.
        folder: gets the model and the data, unless they are there, the log and the metrics.
        variant: `oar` or `grpo`.
        overrides: on top of the recipe and of the smoke test's sizes.
        timeout_s: the run is ended after this many seconds.
        module: the program of verl's that runs it: `MAIN` or one of `EXPERIMENTAL`, on a CPU.

    Returns:
        The metrics of each step, as verl's file logger wrote them.

    Raises:
        RecipeError: the recipe does not compose.
        SmokeFailed: the run failed or took too long.
    """
    config = compose_recipe(recipe, variant)
    if not (folder / "data.parquet").exists():
        make_assets(folder, architecture=architecture_of(str(config.actor_rollout_ref.model.path)))
    metrics, log = folder / "metrics.jsonl", folder / "verl.log"
    metrics.unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    arguments = sizes(recipe, variant, group_of(config, module) if wanted() else "tiny")
    arguments += [f"trainer.default_local_dir={folder}/checkpoints"]
    environment = {"OAR_SMOKE": str(folder), "VERL_FILE_LOGGER_PATH": str(metrics), **cpu_environment()}
    status = run_verl([*arguments, *overrides], environment, log, timeout_s, module=module)
    if status != 0:
        why = f"took longer than {timeout_s:.0f} s" if status == TIMED_OUT else f"ended with status {status}"
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])
        raise SmokeFailed(f"{recipe.name}/{variant}.yaml {why}; its log, {log}, ends with:\n{tail}")
    return read_metrics(metrics)


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when both steps ran, 1 when the run failed, 2 for a recipe that does not compose, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="its folder or its name")
    parser.add_argument("--variant", choices=("oar", "grpo"), default="oar", help="default: oar")
    parser.add_argument(
        "--module", choices=(MAIN, *EXPERIMENTAL), default=MAIN, help="verl's program (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder for model, log and metrics (default: a temporary one)")
    parser.add_argument("overrides", nargs="*", help="for verl, such as algorithm.oar.tau=0.5")
    settings = parser.parse_intermixed_args(arguments)
    folder: Path = (settings.out or Path(tempfile.mkdtemp(prefix="oar_smoke_"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    disable_progress_bar()
    try:
        with console.status(f"two steps of {settings.recipe} on this machine, log in {folder / 'verl.log'}"):
            steps = run_smoke(
                find_recipe(settings.recipe), folder, settings.variant, settings.overrides, module=settings.module
            )
    except (RecipeError, SmokeFailed) as error:
        print(f"smoke: {error}", file=sys.stderr)
        return 2 if isinstance(error, RecipeError) else 1
    except KeyboardInterrupt:
        print("smoke: interrupted", file=sys.stderr)
        return 130
    table = Table("", *(f"step {step['step']}" for step in steps))
    for name, title in SHOWN.items():
        if any(name in step for step in steps):
            table.add_row(title, *(f"{step[name]:.3g}" if name in step else "" for step in steps))
    console.print(table, f"{settings.recipe}, {settings.variant}.yaml ran; all metrics: {folder}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
