"""What knows a host: `taps` any HuggingFace-style causal LM in torch, `verl` the trainer and its engines."""
