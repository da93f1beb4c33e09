"""Runs a recipe where the GPUs are: checks before the start, and what starts a run there."""
