"""Reasoning in miniature: tasks whose causal tokens are known, and small models that half know them.

`vocabulary` has the words, `tasks` the problems and how a response is read, `model` a small causal LM and its sampler,
`warm_start` the training that comes before reinforcement learning. Nothing is downloaded.
"""
