"""verl's agent loops for `one_step_off_policy`, which does not tell `skip.rollout` its steps, so that it would do nothing."""

from typing import Any

from verl.experimental.agent_loop import AgentLoopManager
from verl.utils.skip import SkipManager


class Numbered(AgentLoopManager):
    """Each batch is a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        SkipManager.init(self.config)
        SkipManager.set_step(0)

    async def generate_sequences(self, prompts: Any) -> Any:
        SkipManager.set_step(SkipManager.step + 1)
        return await super().generate_sequences(prompts)
