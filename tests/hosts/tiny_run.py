"""A run of real verl on the CPU stack, small enough for a test: a model that writes letters, `####` and a digit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from oar_plugin.hosts.verl.cpu import cpu_environment, cpu_overrides
from oar_plugin.hosts.verl.cpu.session import run_verl
from tests.hosts.engine.world import make_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    answer = solution_str.split("####")[-1].strip()
    return {"score": float(answer == ground_truth), "acc": float(answer == ground_truth)}
"""


def make_assets(folder: Path) -> None:
    """A model that has learnt the format and guesses the digit, prompts, and a reward function. About ten seconds."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    torch.set_num_threads(1)  # two threads only get in each other's way at this size
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = random.Random(0)
    for _ in range(150):
        texts = [f"{rng.randint(0, 9)}?" + letters(rng) + f"#### {rng.randint(0, 3)}<eos>" for _ in range(32)]
        rows = [tokenizer(text)["input_ids"] for text in texts]
        width = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
        labels[:, :2] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "model")
    data = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": f"{digit}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(digit % 4)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i, digit in enumerate(rng.choices(range(10), k=64))
    ]
    pd.DataFrame(data).to_parquet(folder / "data.parquet")
    (folder / "reward.py").write_text(REWARD)


def letters(rng: random.Random) -> str:
    return "".join(rng.choice("abcdef") for _ in range(rng.randint(3, 6)))


def overrides(folder: Path, name: str) -> list[str]:
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return [
        *cpu_overrides(),
        f"data.train_files={folder}/data.parquet",
        f"data.val_files={folder}/data.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        f"actor_rollout_ref.model.path={folder}/model",
        f"{actor}.ppo_mini_batch_size=8",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"{actor}.optim.lr=1e-3",
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


def run(folder: Path, name: str, *more: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run to the end; returns the metrics of each step as verl's own file logger wrote them."""
    (folder / name).mkdir(exist_ok=True)
    metrics = folder / name / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    log = folder / name / "verl.log"
    status = run_verl(
        [*overrides(folder, name), *more],
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
