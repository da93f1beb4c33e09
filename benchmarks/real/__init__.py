"""Train SmolLM2-135M with GRPO and with OAR on the same seeds, in real runs: `oar launch` with verl, Ray and vLLM, as a user
starts it, on problems that it solves in a third to a half of its samples; on one GPU where PyTorch sees any, else on the CPU.

Shown are each pair's curves, what OAR's runs reach minus what GRPO's reach, seconds of a step by part, memory, and how many
responses OAR scored. A few pairs of one small model say that runs work and what they cost, not that OAR is better.

The same command goes on where it was interrupted: finished runs stay in --folder, where `oar inspect` reads their dumps.

examples:
  python -m benchmarks real --parallel 4 --out DIR                       four pairs on a GPU at a time
  python -m benchmarks real --pairs 3 --prompts 4 --n 4 --test-problems 16     on a CPU, hours
  python -m benchmarks real --override algorithm.oar.importance=oar_g actor_rollout_ref.rollout.enforce_eager=True
"""
