"""Continuations of any HuggingFace model, by vLLM; the recipes' reward judges."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from benchmarks.marks.continuation import CONTINUATIONS, Continued, places_of
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.passes.tokens import TokenBytes
from oar_plugin.runs.math.answer import final_answer
from oar_plugin.runs.reward import compute_score, start_pool

_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
_ENVIRONMENT |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def continued(
    model: str, data: Path, problems: int, copies: int, max_tokens: int, spans: int, seed: int
) -> list[Continued]:
    """In a child process, whose end frees the accelerator. Responses without an end or an answer only count in their group."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_in_child, model, data, problems, copies, max_tokens, spans, seed).result()


def _in_child(*given: Any) -> list[Continued]:
    os.environ.update(_ENVIRONMENT | os.environ)  # the user's own come first
    with closing(start_pool(2, 10.0)):  # a process waits at its end for its children
        return _by_vllm(*given)


def _by_vllm(
    model: str, data: Path, problems: int, copies: int, max_tokens: int, spans: int, seed: int
) -> list[Continued]:
    from vllm import LLM, SamplingParams

    frame = pd.read_parquet(data, columns=["prompt", "reward_model"])[:problems]
    tokenizer, judged = AutoTokenizer.from_pretrained(model), dict[Any, bool]()
    prompts: list[list[int]] = tokenizer.apply_chat_template(
        [list(chat) for chat in frame["prompt"]], add_generation_prompt=True, return_dict=False
    )
    engine = LLM(
        model,
        # The model's own, as the importances have it: vLLM would halve float32.
        dtype=str(AutoConfig.from_pretrained(model).dtype or "auto").removeprefix("torch."),
        max_model_len=max(map(len, prompts)) + max_tokens,
        seed=seed,
        enable_prefix_caching=True,
        block_size=16,  # of the cache; with the 128 of a CPU, neighbouring places would share less
        enforce_eager=not torch.cuda.is_available(),  # compiling for a CPU takes longer than it saves
    )

    def sampled(prompt: list[int], count: int, starts: list[list[int]]) -> list[list[list[int]]]:
        left = (max_tokens - len(ids) for ids in starts)
        asked = [SamplingParams(n=count, temperature=1.0, max_tokens=most, detokenize=False) for most in left]
        outputs = engine.generate([{"prompt_token_ids": prompt + ids} for ids in starts], asked, use_tqdm=False)
        return [[[*ids, *one.token_ids] for one in made.outputs] for ids, made in zip(starts, outputs, strict=True)]

    def right(ids: list[int], truth: str) -> bool:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        key = final_answer(text), truth  # few answers differ, and a comparison takes milliseconds
        if key not in judged:
            judged[key] = compute_score("", text, truth)["score"] == 1.0
        return judged[key]

    found, pieces, finder = list[Continued](), TokenBytes(tokenizer).pieces, make_finder(OarConfig().answer_patterns)
    truths = [str(known["ground_truth"]) for known in frame["reward_model"]]
    for prompt, truth in zip(tqdm(prompts, "problems"), truths, strict=True):
        (group,) = sampled(prompt, copies, [[]])
        rewards = [right(ids, truth) for ids in group]
        for ids, reward in zip(group, rewards, strict=True):
            segments = segment_tokens(pieces(ids), finder)
            reasoning = 0 if segments is None else int((segments == Segment.REASONING).sum())
            if len({*rewards}) == 2 and reasoning and len(ids) < max_tokens:
                places = places_of(reasoning, spans)
                written = sampled(prompt, CONTINUATIONS, [ids[:place] for place in places])
                right_PN = np.array([[right(one, truth) for one in of_place] for of_place in written])
                found.append(Continued(prompt, ids, reward, places, right_PN))
    return found
