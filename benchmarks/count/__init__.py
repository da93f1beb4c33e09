"""What a training step costs, counted on fake tensors: no GPU, no weights. Nothing is timed.

It runs the host's forward and update, and the package's own gradient pass.

Reported:
  FLOPs      of one response in log-probs, importance and update, and what each importance adds
  bytes      peak of each phase on one rank, with and without activation checkpointing, sharded over 1 to 512 ranks
  traffic    number and bytes of FSDP2's collectives per micro-batch
  checks     the same phases of a small model with real tensors, by PyTorch's allocation profiler

examples:
  python -m benchmarks count --models Qwen2.5-0.5B      a first look
  python -m benchmarks count --out DIR                  all models
  python -m benchmarks count --recipe qwen2_5_7b_math actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
                                                        shapes that `oar plan` lacks, for its counts.json
"""
