"""OAR in verl: `plugin` is the entry point; `trainer`, `fsdp` and `megatron` have the subclasses that it registers."""
