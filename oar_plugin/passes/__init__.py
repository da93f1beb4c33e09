"""What runs a model for an importance.

`tap` says what one forward is for; `taps` and `megatron_taps` are the hooks that serve it; `gradient` is the one gradient pass,
`masked_copies` runs counterfactual copies, `plain` does both with a HuggingFace model. `request` is what a trainer asks for.
Nothing here knows a host.
"""
