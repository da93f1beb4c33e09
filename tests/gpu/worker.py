"""A rank with one of verl's engines in one layout, asked for importance or for its peak memory. Its words:

fsdp|megatron LAYOUT FOLDER REQUEST...      a request as in tests/hosts/engine/cases.py
fsdp|megatron LAYOUT FOLDER memory TOKENS   that many in each response
"""

from typing import Any

import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from benchmarks.machine import peak_bytes
from oar_plugin.passes.request import IMPORTANCE, REQUEST
from tests.asked import asked
from tests.hosts.engine import world
from tests.hosts.engine.worker import LAYOUTS, asked_of, batch_of, build, join, loss
from tests.processes import worker
from verl_cpu import ulysses

ON_CPU = get_device_name() == "cpu"
FLASH = ulysses.ATTENTION if ON_CPU else "flash_attention_2"
OURS: dict[str, dict[str, Any]] = {
    "flash": {"param_dtype": "bf16", "model": {"override_config": {"attn_implementation": FLASH}}},
    "chunked": {"entropy_from_logits_with_chunking": True},
}
ROWS = 4  # two micro-batches: in the second one the update already holds gradients


def engine_of(kind: str, folder: str, layout: str) -> Any:
    if kind == "megatron":
        from tests.hosts.engine import megatron_worker

        return megatron_worker.engine_of(folder, layout)
    if ON_CPU:
        ulysses.install()
    settings: dict[str, Any] = {"model": {}}
    for word in layout.split():
        more = dict((LAYOUTS | OURS)[word])
        settings["model"] = settings["model"] | more.pop("model", {})
        settings |= more
    return build(folder, **settings)


def scores(engine: Any, layout: str, asked: list[str]) -> dict[str, Any]:
    """The results of each request; rows are split where two ranks are data parallel."""
    apart = {"ulysses", "tp2", "pp2", "cp2"}.isdisjoint(layout.split()) and dist.get_world_size() == 2
    if isinstance(engine.module, torch.nn.Module):
        return asked_of(engine, layout, asked, apart)
    from tests.hosts.engine.megatron_worker import score

    return asked_of(engine, layout, asked, apart, score)


def memory(engine: Any, tokens: int) -> dict[str, int]:
    """Peak bytes, on top of weights and optimizer, of an update, of a log-prob pass, and of one with each importance."""
    tokenizer = world.make_tokenizer()
    ends = torch.tensor(tokenizer("so 3+4 is 7 then\n#### 7<eos>")["input_ids"])
    response = torch.cat([torch.arange(tokens - len(ends)) % 255, ends])
    prompt = torch.tensor(tokenizer("3+4?")["input_ids"])

    def data(importance: str | None, entropy: bool) -> Any:
        made = batch_of([(prompt, response)] * ROWS, [True] * ROWS)
        tu.assign_non_tensor(made, calculate_entropy=entropy)
        if importance is not None:
            request = asked(importance=importance, answer_patterns=("hash",), max_response_length=len(response) + 1)
            tu.assign_non_tensor_data(made, REQUEST, request.to_dict())
        return made

    def update() -> None:
        with engine.train_mode():
            engine.train_batch(data(None, False), loss)

    def infer(importance: str | None) -> None:
        with engine.eval_mode():
            output = engine.infer_batch(data(importance, True)).get("model_output", {})
        assert importance is None or output[IMPORTANCE].values().any(), "nothing was scored"

    device = torch.device("cpu" if ON_CPU else torch.cuda.current_device())
    update()  # the optimizer's state is there from now on
    infer("fisher")
    peaks = {"update": peak_bytes(update, device), "log-probs": peak_bytes(lambda: infer(None), device)}
    return peaks | {name: peak_bytes(lambda name=name: infer(name), device) for name in ("fisher", "entropy")}


def main(kind: str, layout: str, folder: str, *asked: str) -> dict[str, Any]:
    join()
    engine = engine_of(kind, folder, layout)
    return memory(engine, int(asked[1])) if asked[0] == "memory" else scores(engine, layout, [*asked])


if __name__ == "__main__":
    worker(main)
