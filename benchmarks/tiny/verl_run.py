"""A run of verl that trains a small model: its overrides, its environment, its metrics."""

import json
import math
import os
import re
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from oar_plugin.hosts.vllm.versions import installed
from verl_cpu import cpu_environment, wanted

ROOT = Path(__file__).parents[2]
MICRO_BATCH = 32
REWARD = "critic/score/mean"
QUICK = [
    # verl polls every 2 s for a finished batch: longer than a small model's step.
    "trainer.v1.sampler.custom_sampler.path=pkg://verl_cpu.sampler",
    "trainer.v1.sampler.custom_sampler.name=QuickReplayBuffer",
]


def versions(on_cpu: bool) -> dict[str, str | None]:
    """Of verl and vLLM. Raises ValueError: one is missing, or this machine is not one for verl's CPU stack."""
    found = {"verl": next((one.version for one in distributions(name="verl")), None), "vllm": installed()}
    if missing := [name for name, version in found.items() if version is None]:
        raise ValueError(f"{missing[0]} is not installed; `oar doctor` says what is missing for whole runs")
    if on_cpu and not wanted():
        raise ValueError("PyTorch is built for GPUs and sees none; VERL_PLATFORM=cpu runs verl's CPU stack")
    return found


def training_environment(metrics_file: Path) -> dict[str, str]:
    """Variables on top of the caller's: where verl writes its metrics, and this package for the processes that grade."""
    path = dict.fromkeys([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return {
        **cpu_environment(),
        "VERL_FILE_LOGGER_PATH": str(metrics_file),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


def training_overrides(
    model: Path,  # folder of model and tokenizer
    data: Path,  # a parquet file
    checkpoints: Path,  # for the model after the last step
    steps: int,  # one update each
    seed: int,  # of the sampling
    lr: float,
    batch: tuple[int, int],  # prompts, and responses to each
    longest: tuple[int, int],  # tokens of a prompt and of a response
) -> list[str]:
    """Hydra overrides of a training of a small model with the tasks' reward: clipped, without a KL term, saved at its end."""
    (prompts, responses), (prompt, response) = batch, longest
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    micro_batch = math.gcd(MICRO_BATCH, prompts * responses)  # verl wants a divisor of the batch
    return [
        f"data.train_files={quoted(data)}",
        f"data.val_files={quoted(data)}",
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}",
        f"actor_rollout_ref.model.path={quoted(model)}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.optim.lr={lr}",
        f"{actor}.ppo_mini_batch_size={prompts}",
        f"{actor}.ppo_micro_batch_size_per_gpu={micro_batch}",
        f"{actor}.clip_ratio_low=0.2",
        f"{actor}.clip_ratio_high=0.28",
        f"{actor}.use_kl_loss=False",
        f"{actor}.checkpoint.save_contents=[hf_model]",
        f"{rollout}.n={responses}",
        f"{rollout}.seed={seed}",
        f"{rollout}.max_model_len={prompt + response}",
        f"{rollout}.max_num_batched_tokens={max(4096, prompt + response)}",
        f"{rollout}.max_num_seqs={prompts * responses}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={micro_batch}",
        # Room for twice the batch, 100 MB, in place of the 1 GB that vLLM would take.
        f"+{rollout}.engine_kwargs.vllm.num_gpu_blocks_override={2 * prompts * responses}",
        "reward.custom_reward_function.path=pkg://benchmarks.tiny.data",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1",
        f"trainer.save_freq={steps}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={quoted(checkpoints)}",
        "trainer.logger=[console,file]",
    ]


def quoted(path: Path) -> str:
    """A path as Hydra reads it: in quotes where it would take a character for its own syntax."""
    text = str(path)
    if re.fullmatch(r"[\w./-]+", text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """verl's metrics, one flat dictionary a training step, with `step` in it. A half-written line is left out."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return [{"step": record["step"], **record["data"]} for record in records if REWARD in record["data"]]
