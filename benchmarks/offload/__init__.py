"""Measure what counterfactual masking costs (OAR-P: replace each reasoning token in turn, and see how far the answer moves),
beside GRPO's step and the published procedure. Builds a model with random weights; needs torch and transformers, no verl, no
download. Where vLLM is installed an engine is started for generation and for the copies that run on it.

Every candidate takes the same responses once a round. Before anything is timed the published procedure, ours in the actor and
ours on the engine score one response; where they disagree nothing is reported.

How to read it: p / o is how many times faster the engine is than the published procedure; o / g is what exact importance would
add to a step if none of it were hidden behind generation; t0 / t15 says what hiding it costs generation.

examples:
  python -m benchmarks offload --size 1m --response-length 128              a minute or two on a laptop
  python -m benchmarks offload --size 1.5b --dtype bfloat16 --device cuda   on a GPU (not tested)
"""
