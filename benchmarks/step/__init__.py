"""Measure what outcome-grounded importance adds to a training step, beside what the step costs anyway and beside the
published procedure. Builds a model with random weights; needs torch and transformers, no verl, no download.

Measured side by side, every candidate once a round:
  a   log-prob forward: what a step does anyway to get old log-probs and entropy
  b   the same forward with importance fused in: a graph down to the input embeddings and one backward to them
  c   importance alone, for runs that take log-probs from the rollout engine (bypass mode)
  d   OAR-G the published way: one response at a time, two forwards and a backward (d' keeps its weights frozen)
  e   the actor's update: forward, backward, AdamW step
  f   finding the answers, the gate, the diagnostics

A star (b*, c*, e*) means with activation checkpointing.

How to read it: (b - a) / a is what importance adds to the log-prob pass; one means that it costs a second forward.
mem(b) / mem(e) at most one means that whatever memory the update needs is enough for importance.

examples:
  python -m benchmarks step --size 10m --responses 16             a few minutes on a laptop
  python -m benchmarks step --size 1.5b --dtype bfloat16          on a GPU
  python -m benchmarks step --scored-share 0.5                    half of the groups have zero advantage, and are skipped
  python -m benchmarks step --importance oar_g                    the paper's estimator in our fused form: two forwards
"""
