"""Runs a model for an importance. Nothing here knows a host.

`request`: what a trainer asks of an actor. `taps`, `megatron_taps`: hooks for one forward. `gradient`: the gradient pass.
`masked_copies`: counterfactual copies. `plain`: gradient pass and copies for a padded batch of a HuggingFace model.
"""
