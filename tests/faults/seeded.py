"""An agent loop whose responses depend on prompt, copy and weights alone, so that runs can be compared."""

import json
import zlib
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

NAME = "seeded"
CONFIG = f"- name: {NAME}\n  _target_: {__name__}.SeededLoop\n"


class SeededLoop(SingleTurnAgentLoop):
    """verl's loop; vLLM gets a seed with each request.

    One request at a time (`max_num_seqs=1`) rounds alike in every run. verl's own `full_determinism` needs Triton.
    """

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        told = json.dumps([list(kwargs["raw_prompt"]), int(kwargs["session_id"])], sort_keys=True)
        seeded = {**sampling_params, "seed": zlib.crc32(told.encode())}
        return await super().run(seeded, priority=priority, **kwargs)
