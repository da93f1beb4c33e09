"""What a training step costs, counted on fake tensors: no GPU, no weights. Nothing is timed.

It runs the host's forward and update, and the package's own gradient pass. Reported:

  FLOPs      of one response in log-probs, importance and update, and what each importance adds
  bytes      peak of each phase on one rank, with and without activation checkpointing, sharded over 1 to 512 ranks
  traffic    number and bytes of FSDP2's collectives per micro-batch
  checks     the same phases of a small model with real tensors, by PyTorch's allocation profiler

`oar plan` reads none of this: its formulas are compared with these counts.

example: python -m benchmarks count --out DIR --models Qwen2.5-0.5B      without --models: all
"""
