"""A tool, and a parser that finds one call of it in every turn. verl loads this file in its agent-loop workers."""

from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

HINT = " so hmm so"


@function_tool
def hint() -> str:
    """Says something."""
    return HINT.strip()


@ToolParser.register("always")
class Always(ToolParser):
    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        return self.tokenizer.decode(responses_ids), [FunctionCall(name="hint", arguments="{}")]
