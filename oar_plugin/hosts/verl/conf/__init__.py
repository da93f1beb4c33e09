"""Configuration that Hydra finds: presets of OAR, what recipes share, and what runs them without a GPU."""
