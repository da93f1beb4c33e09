"""Runs that are the same bit for bit: responses depend on prompt, copy and weights alone, batches on the data."""

import json
import zlib
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from tests import in_order

NAME = "seeded"


def seeded(folder: Path) -> tuple[str, ...]:
    """The overrides of such a run; the file that they name is written to its folder."""
    loop, rollout, sampler = folder / "loop.yaml", "actor_rollout_ref.rollout", "trainer.v1.sampler.custom_sampler"
    loop.write_text(f"- name: {NAME}\n  _target_: {__name__}.SeededLoop\n", encoding="utf-8")
    return (
        f"{rollout}.max_num_seqs=1",
        f"{rollout}.enable_prefix_caching=False",  # a prompt that is known is computed in other pieces
        f"{rollout}.agent.default_agent_loop={NAME}",
        f"{rollout}.agent.agent_loop_config_path={loop}",
        f"{sampler}.path={in_order.PATH}",
        f"{sampler}.name=InOrder",
    )


class SeededLoop(SingleTurnAgentLoop):
    """verl's loop; vLLM gets a seed with each request.

    One request at a time (`max_num_seqs=1`) rounds alike in every run. verl's own `full_determinism` needs Triton.
    """

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        told = json.dumps([list(kwargs["raw_prompt"]), int(kwargs["session_id"])], sort_keys=True)
        with_seed = {**sampling_params, "seed": zlib.crc32(told.encode())}
        return await super().run(with_seed, priority=priority, **kwargs)
