"""Runs that are equal bit for bit: responses depend only on prompt, copy and weights, batches only on the data."""

import json
import zlib
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from tests.hosts import in_order

NAME = "seeded"


def seeded(folder: Path) -> tuple[str, ...]:
    """Return the overrides of such a run, and write the file that they name to its folder."""
    loop, rollout, sampler = folder / "loop.yaml", "actor_rollout_ref.rollout", "trainer.v1.sampler.custom_sampler"
    loop.write_text(f"- name: {NAME}\n  _target_: {__name__}.SeededLoop\n", encoding="utf-8")
    return (
        f"{rollout}.max_num_seqs=1",
        f"{rollout}.enable_prefix_caching=False",  # a cached prefix changes how a prompt is split, and so its rounding
        f"{rollout}.agent.default_agent_loop={NAME}",
        f"{rollout}.agent.agent_loop_config_path={loop}",
        f"{sampler}.path={in_order.PATH}",
        f"{sampler}.name=InOrder",
    )


class SeededLoop(SingleTurnAgentLoop):
    """verl's loop, with a seed in each request to vLLM; one request at a time rounds alike in every run."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        told = json.dumps([list(kwargs["raw_prompt"]), int(kwargs["session_id"])], sort_keys=True)
        with_seed = {**sampling_params, "seed": zlib.crc32(told.encode())}
        return await super().run(with_seed, priority=priority, **kwargs)
