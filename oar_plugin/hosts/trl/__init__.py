"""Token credit in TRL's `GRPOTrainer`: `OarGRPOTrainer`. Nothing here reaches verl, nor a run of TRL with its own trainer."""

from oar_plugin.hosts.trl.trainer import OarGRPOTrainer

__all__ = ["OarGRPOTrainer"]
