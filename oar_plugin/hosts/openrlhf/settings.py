"""A run's settings, and which of OpenRLHF's arguments OAR does not go with."""

import json
from typing import Any

from transformers import AutoConfig

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.passes.tap import UnsupportedModelError
from oar_plugin.passes.taps import check_logits

OPTION = "--algo.advantage.plugin_args"


def settings_of(args: Any) -> OarConfig:
    """The settings in OpenRLHF's arguments. OarConfigError: what cannot work, a line each: key, value, what is allowed."""
    try:
        settings = json.loads(args.algo.advantage.plugin_args)
    except json.JSONDecodeError:
        settings = None
    if not isinstance(settings, dict):
        given = f"{OPTION}={args.algo.advantage.plugin_args}"
        raise OarConfigError(f'{given}: not a JSON object; allowed: one such as {{"importance": "fisher"}}')
    config = OarConfig.parse(settings, OPTION)
    ds, estimator, path = args.ds, args.algo.advantage.estimator, args.actor.model_name_or_path
    model = AutoConfig.from_pretrained(path, trust_remote_code=True)  # as OpenRLHF itself loads it
    sequence, vocabulary = ds.ring_attn_size, ds.tensor_parallel_size
    refused = [
        ("--ds.ring_attn_size", sequence, sequence > 1, "a rank has a slice of a response; allowed: 1"),
        ("--ds.tensor_parallel_size", vocabulary, vocabulary > 1, "a rank has a slice of the logits; allowed: 1"),
        ("--ds.use_liger_kernel", True, ds.use_liger_kernel, "OAR was not tried with it; allowed: leave it out"),
        ("--ds.deepcompile", True, ds.deepcompile, "a compiled model runs no hooks; allowed: leave it out"),
        ("--actor.model_name_or_path", path, hasattr(model, "vision_config"), "it sees images; allowed: text models"),
        ("--algo.advantage.estimator", estimator, estimator == "gae",
         "a critic already gives each token its own advantage; allowed: group_norm, dr_grpo, rloo, ..."),
        (f"{OPTION}.base_estimator", config.base_estimator, "base_estimator" in settings,
         "OpenRLHF's is --algo.advantage.estimator; allowed: leave it out"),
        (f"{OPTION}.perturbation.backend", "rollout", config.offloads, "its engines score nothing; allowed: actor"),
    ]  # fmt: skip
    faults = [f"{key}={value}: {why}" for key, value, wrong, why in refused if wrong]
    try:
        check_logits(model)
    except UnsupportedModelError as error:
        faults.append(f"--actor.model_name_or_path={path}: {error}")
    if faults:
        raise OarConfigError("\n".join(faults))
    return config
