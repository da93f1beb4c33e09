"""Configuration that Hydra finds: presets of OAR, and what recipes share."""
