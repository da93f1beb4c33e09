"""OAR in verl 0.9.1: `plugin` is the entry point, `trainer` and `fsdp` the subclasses that it registers."""

SERVED = "0.9.1"
"""The version of verl that the subclasses were written against."""
