"""A run of real verl on the CPU stack, small enough for a test: a model that writes letters, `####` and a digit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oar_plugin.hosts.verl.cpu import cpu_environment, cpu_overrides, tiny_model
from oar_plugin.hosts.verl.cpu.session import run_verl

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    answer = solution_str.split("####")[-1].strip()
    return {"score": float(answer == ground_truth), "acc": float(answer == ground_truth)}
"""


def make_assets(folder: Path, length: tuple[int, int] = (3, 6)) -> None:
    """The tiny model and its prompts, and a reward function that costs nothing."""
    tiny_model.make_assets(folder, length)
    (folder / "reward.py").write_text(REWARD)


def overrides(folder: Path, name: str, workers: int, rollout_parallel: int, engine: str) -> list[str]:
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return [
        *cpu_overrides(workers, rollout_parallel, engine),
        f"data.train_files={folder}/data.parquet",
        f"data.val_files={folder}/data.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        f"actor_rollout_ref.model.path={folder}/model",
        f"{actor}.ppo_mini_batch_size=8",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"{actor}.optim.lr=3e-4",
        f"{actor}.use_kl_loss=False",
        f"{rollout}.n=4",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.max_model_len=64",
        f"{rollout}.max_num_batched_tokens=512",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/{name}/checkpoints",
        f"trainer.project_name={name}",
        "trainer.experiment_name=run",
        f"hydra.run.dir={folder}/{name}/hydra",
        "algorithm.adv_estimator=oar",
    ]


def run(
    folder: Path,
    name: str,
    *more: str,
    env: dict[str, str] | None = None,
    workers: int = 1,
    rollout_parallel: int = 1,
    engine: str = "dp",
) -> list[dict[str, Any]]:
    """Run to the end; returns the metrics of each step as verl's own file logger wrote them.

    Args:
        folder: with the assets.
        name: of the run.
        more: overrides; the last one for a key wins.
        env: more environment variables.
        workers: of the actor.
        rollout_parallel: processes of the vLLM engine.
        engine: which trains: dp or megatron.
    """
    (folder / name).mkdir(exist_ok=True)
    metrics = folder / name / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    log = folder / name / "verl.log"
    status = run_verl(
        [*overrides(folder, name, workers, rollout_parallel, engine), *more],
        env={**cpu_environment(), "VERL_FILE_LOGGER_PATH": str(metrics), **(env or {})},
        log_path=log,
        timeout_s=420,
    )
    assert status == 0, log.read_text(errors="replace")[-6000:]
    steps = []
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        steps.append({"step": record["step"], **record["data"]})
    return steps
