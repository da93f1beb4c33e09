"""Runs a model for an importance. Nothing here knows a host.

`request`: what a trainer asks of an actor. `tap`: what one forward is for; `taps` and `megatron_taps` are the hooks for it.
`gradient`: the gradient pass and its loop; `masked_copies`: counterfactual copies; `plain`: both, for a HuggingFace model.
"""
