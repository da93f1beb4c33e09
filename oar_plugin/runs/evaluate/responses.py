"""Reads problems, and has `vllm run-batch` answer them. A model's responses to one set are kept, and are not made again."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AliasPath, BaseModel, BeforeValidator, Field

from oar_plugin.output import cause, write_whole
from oar_plugin.runs.evaluate.checkpoints import EvaluationError, fingerprint
from oar_plugin.runs.math.sources import SOURCES, DataError, messages_of, rows_of, truth_of

_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
_ENVIRONMENT |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Runs a command, and kills its process group when this process ends, however it ends: engines would keep their GPUs.
_UNTIL_STDIN_CLOSES = 'exec 3<&0; { cat <&3 >/dev/null; kill -KILL 0; } & exec "$@" 3<&- </dev/null >&2'


class _Row(BaseModel):
    prompt: Annotated[list[dict[str, Any]], BeforeValidator(messages_of)]
    truth: Annotated[Any, BeforeValidator(truth_of)] = Field(validation_alias=AliasPath("reward_model", "ground_truth"))
    images: list[Any] = Field([], max_length=0)  # problems are asked as text
    videos: list[Any] = Field([], max_length=0)


class ProblemSet(NamedTuple):
    name: str
    problems: list[tuple[list[dict[str, Any]], Any]]  # what `messages_of` and `truth_of` return


def read_problems(name: str, folder: Path, limit: int | None) -> ProblemSet:
    """Return the set `folder/NAME/test.parquet`, or the file NAME, with equal prompts once. Raises EvaluationError."""
    is_file, unique = name.endswith((".parquet", ".json", ".jsonl")), dict[str, _Row]()
    path = Path(name).expanduser() if is_file else folder / name / "test.parquet"
    try:
        for number, row in rows_of(path, _Row):
            first = unique.setdefault(json.dumps(row.prompt), row)
            if row.truth != first.truth:
                raise DataError(f"{path}, row {number}: {row.truth!r}, where an equal prompt has {first.truth!r}")
    except (ValueError, OSError) as error:  # Arrow's errors are ValueErrors
        is_made = name in SOURCES and "test" in SOURCES[name].splits
        advice = f"oar data {name} --out {folder} makes it" if is_made else "see oar eval --help"
        raise EvaluationError(f"--data={name}: cannot read {path}: {cause(error)}; {advice}") from error
    name = path.absolute().parent.name if path.stem == "test" else path.stem
    return ProblemSet(name, [(row.prompt, row.truth) for row in unique.values()][:limit])


def responses_of(
    model: str, problems: ProblemSet, sampling: Mapping[str, float], k: int, tensor_parallel: int, folder: Path
) -> list[list[str]]:
    """Return k responses to each problem: of `folder`, or generated if it has no file for these weights and settings. Raise
    EvaluationError if vLLM fails, or if the file is damaged.
    """
    made_with = json.dumps([model, fingerprint(model), problems, sampling, k])
    file = folder / f"{problems.name}-{hashlib.sha256(made_with.encode()).hexdigest()[:12]}.jsonl"
    is_new, requests = not file.is_file(), []
    for number, (prompt, _) in enumerate(problems.problems):
        for sample in range(k):
            # The seed depends neither on the order of problems nor on k.
            digest = hashlib.sha256(f"{sampling['seed']} {prompt} {sample}".encode()).digest()
            body = {**sampling, "model": "model", "messages": prompt, "seed": int.from_bytes(digest[:4], "big")}
            call = {"custom_id": f"{number}-{sample}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            requests.append(json.dumps(call))
    lines = _answers(model, requests, tensor_parallel) if is_new else file.read_bytes()
    try:
        rows = [json.loads(line) for line in lines.splitlines()]
        errors = [row["error"] for row in rows if row["error"]]
        if errors or len(rows) != len(requests):
            raise ValueError(f"{len(rows)} responses to {len(requests)} requests; errors: {errors[:1]}")
        made = [str(row["response"]["body"]["choices"][0]["message"]["content"] or "") for row in rows]
    except (ValueError, TypeError, KeyError, IndexError) as error:
        advice = "see vLLM's messages above" if is_new else f"{file} is damaged; delete it"
        raise EvaluationError(f"{model}, {problems.name}: {cause(error)}; {advice}") from error
    if is_new:
        write_whole(file, lines)
    return [made[first : first + k] for first in range(0, len(made), k)]


def _answers(model: str, requests: Sequence[str], tensor_parallel: int) -> bytes:
    """Return the lines that vLLM answers, in the order of the requests. It uses all visible GPUs, or else the CPU."""
    import torch

    gpus = torch.cuda.device_count()  # does not initialise CUDA
    with tempfile.TemporaryDirectory() as place:
        asked, answered = Path(place, "requests.jsonl"), Path(place, "responses.jsonl")
        asked.write_text("\n".join(requests), encoding="utf-8")
        options = {"input-file": asked, "output-file": answered, "model": model, "served-model-name": "model"}
        # The longest context that fits into memory, and no settings from the model's generation_config.json.
        options |= {"max-model-len": -1, "generation-config": "vllm"}
        options |= {"tensor-parallel-size": tensor_parallel, "data-parallel-size": max(1, gpus // tensor_parallel)}
        flags = [f"--{k}={v}" for k, v in options.items()]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.run_batch", *flags]
        command += [] if gpus else ["--enforce-eager"]  # compiling for a CPU takes longer than it saves
        guarded, environment = ["/bin/sh", "-c", _UNTIL_STDIN_CLOSES, "sh", *command], {**_ENVIRONMENT, **os.environ}
        with subprocess.Popen(guarded, stdin=subprocess.PIPE, env=environment, start_new_session=True) as vllm:
            vllm.wait()
        return answered.read_bytes() if answered.is_file() else b""
