"""The file for ms-swift's flag `--external_plugins`, which takes a path: `oar doctor` prints it."""

import sys

from swift.trainers import TrainerFactory

from oar_plugin.config import OarConfigError
from oar_plugin.hosts.swift import settings

if "swift.megatron" in sys.modules:
    raise OarConfigError("megatron rlhf: nothing can be added to advantages within its steps; allowed: swift rlhf")
settings()  # a fault stops the run before it loads a model
TrainerFactory.TRAINER_MAPPING["grpo"] = "oar_plugin.hosts.swift.trainer.OarGRPOTrainer"
