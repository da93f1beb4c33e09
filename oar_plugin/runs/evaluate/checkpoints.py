"""Resolves a CHECKPOINT argument to a model: a folder in HuggingFace's format, or a name on the hub."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from oar_plugin.runs.hub import WEIGHTS, NotOnHub, cached

MERGED = "merged"  # folder for merged weights, next to a verl checkpoint's shards


class EvaluationError(Exception):
    """An evaluation cannot continue. The message says what to do."""


def find(text: str, say: Callable[[str], None]) -> str:
    """Return the folder or hub name of the model of a CHECKPOINT, as `oar eval --help` describes it.

    The first call merges a checkpoint's shards, which takes minutes for a large model; `say` gets a message before. Raise
    EvaluationError if there is no model, or if it cannot be merged.
    """
    folder = Path(text).expanduser()
    if not folder.is_dir():
        try:
            cached(text)
            return text
        except NotOnHub as error:
            raise EvaluationError(f"{text}: neither a folder nor a name on the hub: {error}") from error
    step = _last_step(folder)
    actor = (step / "actor" if (step / "actor").is_dir() else step).resolve()
    for ready in (folder.resolve(), actor / "huggingface", actor / "model/huggingface", actor / MERGED):
        if _is_model(ready):
            return str(ready)
    for shards, backend in (("fsdp_config.json", "fsdp"), ("model/dist_ckpt", "megatron"), ("dist_ckpt", "megatron")):
        if (actor / shards).exists():
            return str(_merge(actor, backend, say))
    wanted = f"config.json and {' or '.join(WEIGHTS)}, a checkpoint of verl (global_step_N), or a folder of these"
    raise EvaluationError(f"{actor}: holds no model: it needs {wanted}")


def fingerprint(model: str) -> str:
    """Return a hash of the names, sizes and times of a folder's weights and settings. Names on the hub have the same one."""
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(Path(model).glob("*.*"))]
    return hashlib.sha256(repr(files).encode()).hexdigest()[:16]


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(list(folder.glob(pattern)) for pattern in WEIGHTS)


def _last_step(folder: Path) -> Path:
    """Return the last complete checkpoint in a folder of checkpoints; any other folder is returned unchanged."""
    steps = {step.name[12:]: step for step in folder.glob("global_step_*") if step.name[12:].isdecimal()}
    # verl writes this file after a checkpoint is complete. The named checkpoint may have been deleted, or not copied.
    complete = folder / "latest_checkpointed_iteration.txt"
    named = complete.read_text(encoding="utf-8").strip() if complete.is_file() else ""
    return steps.get(named) or steps.get(max(steps, key=int, default=""), folder)


def _merge(actor: Path, backend: str, say: Callable[[str], None]) -> Path:
    """Merge the shards of a checkpoint, and a LoRA adapter if it has one; return the folder of the model."""
    target = actor / MERGED
    unpickled = "; Megatron shards are unpickled; merge only runs that you trust" if backend == "megatron" else ""
    say(f"merging {actor} into {target} with verl.model_merger; later evaluations reuse it{unpickled}")
    # A temporary folder: another evaluation may be merging the same checkpoint.
    with tempfile.TemporaryDirectory(prefix=f"{MERGED}.", dir=actor) as place:
        partial = Path(place, MERGED)
        command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", backend, "--local_dir", str(actor)]
        # A process of its own frees the memory of all shards. verl would unpickle any object in them without these variables.
        safe = {**os.environ, "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
        done = subprocess.run([*command, "--target_dir", str(partial)], env=safe, capture_output=True)
        if done.returncode or not _is_model(partial):
            said = "\n".join((done.stdout + done.stderr).decode(errors="replace").strip().splitlines()[-15:])
            raise EvaluationError(f"{actor}: verl.model_merger failed (exit status {done.returncode}):\n{said}")
        if (partial / "lora_adapter").is_dir():  # as verl's merger writes it, beside the base model
            from peft import PeftModel
            from transformers import AutoModelForCausalLM

            base = AutoModelForCausalLM.from_pretrained(partial, dtype="auto", trust_remote_code=False)
            PeftModel.from_pretrained(base, str(partial / "lora_adapter")).merge_and_unload().save_pretrained(partial)
            shutil.rmtree(partial / "lora_adapter")
        if not _is_model(target):  # else another evaluation was faster
            partial.rename(target)
    return target
