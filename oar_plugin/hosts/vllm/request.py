"""Makes one tagged request to a vLLM engine and reads the worker's numbers from its output."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, nullcontext
from typing import TYPE_CHECKING

from oar_plugin.hosts.vllm.outcomes import Spec
from oar_plugin.hosts.vllm.tags import TAG

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

Admit = Callable[[], AbstractAsyncContextManager[object]]
"""Held while a request is on its way into the engine. May wait; raises to refuse the request."""


class Refused(Exception):
    """`Admit` raised; the request was not made."""


async def tagged_request(
    engine: AsyncLLM,
    token_ids: Sequence[int],
    spec: Spec,
    salt: str,
    use_cache: bool = True,
    priority: int = 0,
    lora_request: LoRARequest | None = None,
    admit: Admit = nullcontext,
) -> RequestOutput:
    """Run one request to its end. It is aborted when this is cancelled.

    Args:
        engine: with `OutcomeExtension` installed.
        token_ids: the whole prompt.
        salt: blocks of the prefix cache are shared by requests of the same salt only.
        use_cache: read the prefix cache. Rows found there are not computed, see `outcomes`.

    Raises:
        Refused: by `admit`.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=list(token_ids), cache_salt=salt)
    sampling_params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,  # the rows are numbers under a token that is not meant
        prompt_logprobs=0,
        skip_reading_prefix_cache=not use_cache,
        extra_args={TAG: spec.to_dict()},
    )
    final: RequestOutput | None = None
    async with AsyncExitStack() as gate:
        try:
            await gate.enter_async_context(admit())
        except Exception as error:
            raise Refused from error
        outputs = engine.generate(
            prompt, sampling_params, f"oar-{uuid.uuid4().hex}", lora_request=lora_request, priority=priority
        )
        async with aclosing(outputs):
            async for output in outputs:
                # vLLM takes a request when its outputs are first asked for: by now it is in.
                await gate.aclose()
                final = output
    assert final is not None, "a request that is not aborted ends with an output"
    return final


def was_aborted(output: RequestOutput) -> bool:
    """Whether somebody else ended the request, as hosts do before they exchange weights."""
    return not output.outputs or output.outputs[0].finish_reason == "abort"


def numbers_of(output: RequestOutput) -> list[float]:
    """What `OutcomeRecorder.step` returned for the request; empty where the engine lost it."""
    # The first token of a prompt has no row that predicts it: vLLM puts None there.
    rows = (output.prompt_logprobs or [])[1:]
    return [next(iter(row.values())).logprob for row in rows if row]
