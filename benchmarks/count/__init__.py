"""What a training step costs, counted on fake tensors: no GPU, no weights. Nothing is timed.

It runs `oar_plugin.runs.plan.count`: the package's own gradient pass, and the host's forward and update.

Reported:
  FLOPs      of one response in log-probs, importance and update, and what each importance adds
  bytes      peak of each phase on one rank, with and without activation checkpointing, sharded over 1 to 512 ranks
  traffic    number and bytes of FSDP2's collectives per micro-batch
  checks     the same phases of a small model with real tensors, by PyTorch's allocation profiler

examples:
  python -m benchmarks count --models Qwen2.5-0.5B      a first look
  python -m benchmarks count --out DIR                  all models
"""
