"""Runs a model for an importance, and knows no host: `taps` hooks a forward, `gradient` and `copies` use the taps."""
