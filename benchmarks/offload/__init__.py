"""Measure what counterfactual masking costs (OAR-P: replace each reasoning token in turn, and see how far the answer moves),
beside GRPO's step and the published procedure. Builds a model with random weights; needs torch and transformers, no verl, no
download. Where vLLM is installed an engine is started for generation and for the copies that run on it.

Measured side by side, every candidate once a round, all on the same responses:
  g    GRPO's step: vLLM generates the responses (g1), log-prob forward (g2), update (g3)
  p    the published procedure: whole copies in one batch, float32 logits of all positions, no cache
  l    exact in the actor (algorithm.oar.importance=oar_p): the prefix is shared, only the answer's rows are projected
  l30  importance=hybrid: a gradient pass chooses the 30 % of the tokens that get a copy
  l8   exact, eight tokens a copy (perturbation.span=8)
  o    exact on an idle vLLM engine (perturbation.backend=rollout)
  o30  same with budget=0.3: blocks first, then the tokens of those that matter
  o8   same, eight tokens a copy
  t0   a batch of requests that is generated alone
  t15  same while a backlog of responses is scored on the same engine, copies let in for 15 % of the time (the default)
  t100 same without a limit in time

How to read it: p / o is how many times faster the engine is than the published procedure; o / g is what exact importance would
add to a step if none of it were hidden behind generation; t0 / t15 says what hiding it costs generation.
Before anything is timed p, l and o score one response; where they disagree nothing is reported.

examples:
  python -m benchmarks offload --size 1m --response-length 128              a minute or two on a laptop
  python -m benchmarks offload --size 10m --response-length 128 256 512     and how it grows with the length
  python -m benchmarks offload --size 0.1b --copies-at-most auto            a minute a candidate and round, scaled up
  python -m benchmarks offload --size 1.5b --dtype bfloat16 --device cuda   on a GPU (not tested)
"""

from benchmarks.offload.study import Settings, measure

__all__ = ["Settings", "measure"]
