"""OAR in verl: `plugin` is the entry point, `trainer`, `fsdp` and `megatron` the subclasses that it registers.

`capabilities` lists what they touch of verl.
"""
