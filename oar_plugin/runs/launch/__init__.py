"""Runs a recipe where the GPUs are: names of runs, checks before the start, the templates of `recipes/cluster`."""
