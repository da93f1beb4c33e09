"""Resolves a CHECKPOINT argument to a model: a folder in HuggingFace's format, or a name on the hub."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from oar_plugin.runs.evaluate import EvaluationError
from oar_plugin.runs.hub import WEIGHTS, NotOnHub, cached

SETTINGS = ("*.json", "*.jinja")  # architecture, tokenizer, chat template, end-of-text tokens
MERGED = "merged"  # folder for merged weights, next to a verl checkpoint's shards
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def parse(words: Sequence[str]) -> dict[str, list[str]]:
    """Return name -> paths from arguments of the form `[NAME=]PATH[,PATH...]`.

    Raise ValueError if a name or path is empty, or if two names are equal.
    """
    rows: dict[str, list[str]] = {}
    for word in words:
        name, equals, rest = word.partition("=")
        paths = (rest if equals else word).split(",")
        if not all(paths) or not name:
            raise ValueError(f"{word}: must be CHECKPOINT or NAME=CHECKPOINT; separate seeds of one method by commas")
        if not equals:
            parts = [part for part in Path(paths[0]).absolute().parts if part != "actor"]
            name = "/".join(parts[-2:]) if parts[-1].startswith("global_step_") else parts[-1]
        if name in rows:
            raise ValueError(f"{word}: the name {name} is taken; choose another with NAME=CHECKPOINT")
        rows[name] = paths
    return rows


def find(text: str, best: bool, say: Callable[[str], None]) -> str:
    """Return the folder or hub name of a checkpoint's model. The first call on a sharded checkpoint merges its shards.

    `text` is a folder in HuggingFace's format, a checkpoint of verl (`.../global_step_N` or its `actor`), a folder of such
    checkpoints (the last one is used; with `best`, the one in its folder `best`), or a name on the hub. `say` gets a message
    before a merge, which takes minutes for a large model. Raise EvaluationError if there is no model or if the merge fails.
    """
    folder = Path(text).expanduser()
    if not folder.is_dir():
        try:
            if not _HUB_NAME.fullmatch(text):
                raise NotOnHub("it is not organisation/model")
            cached(text)
            return text
        except NotOnHub as error:
            raise EvaluationError(f"{text}: neither a folder nor a name on the hub: {error}") from error
    if _is_model(folder):
        return str(folder.resolve())
    folder = _step_of(folder, best)
    actor = (folder / "actor" if (folder / "actor").is_dir() else folder).resolve()
    for ready in ("huggingface", "model/huggingface", MERGED):
        if _is_model(actor / ready):
            return str(actor / ready)
    for shards, backend in (("fsdp_config.json", "fsdp"), ("model/dist_ckpt", "megatron"), ("dist_ckpt", "megatron")):
        if (actor / shards).exists():
            return str(_merge(actor, backend, say))
    raise EvaluationError(
        f"{text}: holds no model: neither config.json with weights ({', '.join(WEIGHTS)}), nor a checkpoint of verl "
        "(global_step_N/actor with fsdp_config.json or dist_ckpt), nor a folder of such checkpoints"
    )


def fingerprint(model: str) -> str:
    """Return a hash of a folder's weights (name, size, time) and of its settings; for a model on the hub, its name."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    weights = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in _files(folder, WEIGHTS)]
    settings = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in _files(folder, SETTINGS)]
    return hashlib.sha256(json.dumps([weights, settings]).encode()).hexdigest()[:16]


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted(file for pattern in patterns for file in folder.glob(pattern))


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and bool(_files(folder, WEIGHTS))


def _step_of(folder: Path, best: bool) -> Path:
    """Return the last (or best) checkpoint in a folder of checkpoints; any other folder is returned unchanged."""
    place = folder / "best" if best else folder
    steps = {step.name: step for step in place.glob("global_step_*") if step.name[12:].isdigit()}
    if not steps and best:
        raise EvaluationError(f"--best: {folder} has no best/global_step_N; without --best the last one is used")
    if not steps:
        return folder
    # verl writes this file after a checkpoint is complete. The named checkpoint may have been deleted, or not copied.
    complete = place / "latest_checkpointed_iteration.txt"
    named = f"global_step_{complete.read_text(encoding='utf-8').strip()}" if complete.is_file() else ""
    return steps.get(named) or steps[max(steps, key=lambda name: int(name[12:]))]


def _merge(actor: Path, backend: str, say: Callable[[str], None]) -> Path:
    target = actor / MERGED
    unpickled = "; Megatron shards are unpickled; merge only runs that you trust" if backend == "megatron" else ""
    say(f"merging {actor} into {target} with verl.model_merger; later evaluations reuse it{unpickled}")
    merger = ["verl.model_merger", "merge", "--backend", backend, "--local_dir", str(actor), "--target_dir"]
    try:
        # Merge in a temporary folder: another evaluation may be merging the same checkpoint.
        with tempfile.TemporaryDirectory(prefix=f"{MERGED}.", dir=actor) as place:
            partial = Path(place) / MERGED
            partial.mkdir()
            # A separate process: it imports verl, and its end frees the memory of all shards.
            done = subprocess.run(
                [sys.executable, "-m", *merger, str(partial)],
                # Without these, verl would unpickle any object in the shards.
                env={**os.environ, "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"},
                capture_output=True,
            )
            if done.returncode or not _is_model(partial):
                said = "\n".join((done.stdout + done.stderr).decode(errors="replace").strip().splitlines()[-15:])
                raise EvaluationError(f"{actor}: verl.model_merger failed (exit status {done.returncode}):\n{said}")
            if (partial / "lora_adapter").is_dir():
                _fold_in_adapter(partial)
            try:
                partial.rename(target)
            except OSError:
                if not _is_model(target):  # no other evaluation has written it: a real error
                    raise
    except OSError as error:
        raise EvaluationError(
            f"{actor}: cannot write {target}: {error.strerror or error}; merge it elsewhere with "
            f"python -m {' '.join(merger)} DIR, and evaluate DIR"
        ) from error
    return target


def _fold_in_adapter(folder: Path) -> None:
    """Merge a LoRA adapter into the base model's weights. verl's merger wrote the adapter to a separate folder."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False)
    PeftModel.from_pretrained(base, str(folder / "lora_adapter")).merge_and_unload().save_pretrained(folder)
    shutil.rmtree(folder / "lora_adapter")
