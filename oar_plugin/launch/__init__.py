"""Running a recipe where the GPUs are.

`job` reads from a recipe what it needs, `environment` says which variables all nodes must have, and `local`, `ray_nodes`,
`slurm` and `kubernetes` run it. `wait` is what they run on the head node before training begins.
"""
