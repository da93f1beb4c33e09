"""Rollouts as OpenRLHF's generator makes them, and its experience maker on top of actors in this process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.hosts.engine import world

PLUGIN = ("--algo.advantage.plugin", "oar_plugin.hosts.openrlhf:OarAdvantage", "--algo.advantage.plugin_args")
TURNS = [("4+4?", True), ("4+4 is", True), ("<tool: 8>", False), (" so 8\n#### 8<eos>", True)]
"""A response of two turns with a tool's answer between them; the first text is the prompt."""
RIGHT = [1, 0, 1, 0, 1, 0, 1, 0, 1, 1, 1, 1]
"""Rewards of three prompts with four responses each. All of the last prompt's are right: their advantage is zero."""
UNSCORED = {5: "no_answer", 6: "truncated", 7: "no_reasoning"}


def words(folder: Path, *more: str) -> list[str]:
    batches = ("--rollout.micro_batch_size", "3", "--train.micro_batch_size", "2", "--train.batch_size", "4")
    model = ("--actor.model_name_or_path", str(folder), "--ckpt.path", str(folder / "ckpt"))
    return ["--algo.advantage.estimator", "group_norm", "--rollout.temperature", "0.7", *batches, *model, *more]


def rollouts(host: Any) -> list[Any]:
    tokenizer = world.make_tokenizer()
    texts = [[(prompt, False), (response, True)] for prompt, response, _ in world.ROWS]
    texts[2] = [(TURNS[0][0], False), *TURNS[1:]]
    generator = host.generator.SamplesGenerator._process_response_into_experience
    samples = []
    for number, (right, parts) in enumerate(zip(RIGHT, texts + texts[:4], strict=True)):
        ids, ranges = [], []
        for text, own in parts:
            begin, _ = len(ids), ids.extend(tokenizer(text)["input_ids"])
            ranges += [(begin, len(ids))] if own else []
        response = {"observation_tokens": ids, "action_ranges": ranges, "reward": float(right), "scores": float(right)}
        more = {"rollout_log_probs": None, "prompt": parts[0][0], "label": "?", "truncated": number == 6}
        samples.append(generator(None, response | more, max_len=64))
    return samples


def policy(host: Any, args: Any, actor: Any) -> Any:
    """An actor process, without its start."""
    made = object.__new__(host.Policy)
    made.actor, made.tokenizer = actor.train(), world.make_tokenizer()
    made.strategy = SimpleNamespace(args=args, ring_attn_group=None, is_rank_0=lambda: False)
    return made


class Group:
    """OpenRLHF's `RayActorGroup`, of objects."""

    def __init__(self, *actors: Any) -> None:
        self.actors = actors

    def async_run_method_batch(self, method_name: str, **lists: list[Any]) -> list[Any]:
        total = len(next(iter(lists.values())))
        size = -(-total // len(self.actors))
        spans = [(at * size, min(total, at * size + size)) for at in range(len(self.actors))]
        return [one.execute_batch(method_name, lists, *span) for one, span in zip(self.actors, spans, strict=True)]


def maker(host: Any, args: Any, actor: Any, step: int = 0, **groups: Any) -> Any:
    """OpenRLHF's experience maker, with one policy as both ranks of the actor."""
    one = policy(host, args, actor)
    others = [groups.get(name) for name in ("critic", "reward", "initial")]
    kl, strategy = SimpleNamespace(value=args.algo.kl.init_coef), SimpleNamespace(args=args)
    made = host.maker.RemoteExperienceMaker(Group(one, one), *others, kl, strategy, one.tokenizer)
    made.global_step = step
    return made


def actor(host: Any, folder: Path, packing: bool = False, wide: bool = True) -> Any:
    """OpenRLHF's `Actor`. It loads models in half precision alone: `wide` ones are widened afterwards."""
    with host.here():
        made = host.models.Actor(str(folder), attn_implementation="sdpa", packing_samples=packing, temperature=0.7)
    if wide:
        made.model.float()
    return made
