"""Measure how a training step scales over processes, GRPO and OAR side by side: log-prob pass, importance and update through
verl's own engines (FSDP2 with Ulysses; Megatron), on CPUs with gloo or on GPUs with NCCL. Needs verl; for tensor, pipeline and
context also megatron-core and mbridge.

What is scaled (--parallel), each at every size of --processes:
  data      FSDP2, fully sharded; weak (as many responses a rank at every size) and strong (as many in all)
  tensor    Megatron tensor parallelism with its sequence parallelism
  pipeline  Megatron pipeline stages
  sequence  Ulysses sequence parallelism under FSDP2
  context   Megatron context parallelism
  --layout  any combination of them

Each layout is a launch of its own, with a time limit; one that fails is reported with its
reason, the others go on, and the exit status is 1.

How to read it: OAR / GRPO at each size, against the same at the smallest size: that it stays is the point (at most 5 % more).
Where processes share cores or a device, seconds are no speed-up. On clusters: benchmarks/SCALING.md.

examples:
  python -m benchmarks scaling --size 1m --parallel data tensor --processes 1 2       a few minutes on a laptop
  python -m benchmarks scaling --processes 1 2 4 8 --dtype bfloat16 --size 1.5b --responses 64 --out DIR    eight GPUs
  python -m benchmarks scaling --launcher print --layout megatron:tensor=8 megatron:tensor=8,data=8   what to start on each node
  python -m benchmarks scaling --launcher none --runs DIR ... --out DIR               the report of what was measured so
  python -m benchmarks scaling --project qwen2_5_7b_math      measures nothing: what the planner expects on 8 to 512 GPUs
"""
