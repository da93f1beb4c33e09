"""Runs a model for an importance. Nothing here knows a host.

`taps`: hooks for one forward. `gradient`: the gradient pass. `plain`: both for a padded batch of a HuggingFace model.
"""
