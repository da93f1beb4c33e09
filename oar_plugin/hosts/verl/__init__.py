"""OAR in verl 0.9.1: `plugin` is the entry point, `trainer` and `fsdp` the subclasses that it registers."""
