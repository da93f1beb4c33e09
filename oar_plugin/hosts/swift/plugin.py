"""The file for ms-swift's flag `--external_plugins`, which takes a path: `oar doctor` prints it."""

import sys

from swift.trainers import TrainerFactory

from oar_plugin.config import OarConfigError
from oar_plugin.hosts.swift import settings

if "swift.megatron" in sys.modules:
    why = "its trainers compute advantages within their steps, where nothing can be added; allowed: swift rlhf"
    raise OarConfigError(f"megatron rlhf: {why}")
settings()  # a fault stops the run before it loads a model
TrainerFactory.TRAINER_MAPPING["grpo"] = "oar_plugin.hosts.swift.trainer.OarGRPOTrainer"
