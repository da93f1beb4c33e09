"""Reads a run's settings, and refuses the arguments of OpenRLHF that OAR does not support."""

import json
from operator import attrgetter
from typing import Any

from transformers import AutoConfig

from oar_plugin.config import OarConfig, OarConfigError

OPTION = "--algo.advantage.plugin_args"


def settings_of(args: Any) -> OarConfig:
    """Returns the settings in OpenRLHF's arguments. OarConfigError: a line for each setting or argument that cannot work."""
    try:
        settings = json.loads(given := args.algo.advantage.plugin_args)
    except json.JSONDecodeError:
        settings = None
    if not isinstance(settings, dict):
        raise OarConfigError(f'{OPTION}={given}: not a JSON object; allowed: one such as {{"importance": "fisher"}}')
    # Its batches come in parts, from which nothing is predicted; and exact scores of all are no default.
    config = OarConfig.parse({"importance": "fisher"} | settings, OPTION, predicts=False)
    model = AutoConfig.from_pretrained(args.actor.model_name_or_path, trust_remote_code=True)  # as OpenRLHF loads it
    ds, actor, advantage, kl = args.ds, args.actor, args.algo.advantage, args.algo.kl
    refused = [
        ("ds.ring_attn_size", ds.ring_attn_size > 1, "a rank has a slice of a response; allowed: 1"),
        ("ds.tensor_parallel_size", ds.tensor_parallel_size > 1, "a rank has a slice of the logits; allowed: 1"),
        ("ds.zero_stage", ds.zero_stage < 2, "gradients of a step under way lie where OAR's are made; allowed: 2, 3"),
        ("ds.use_liger_kernel", ds.use_liger_kernel, "OAR was not tried with it; allowed: leave it out"),
        ("ds.deepcompile", ds.deepcompile, "a compiled model runs no hooks; allowed: leave it out"),
        ("actor.model_name_or_path", hasattr(model, "vision_config"), "it sees images; allowed: text models"),
        ("actor.policy_loss_type", actor.policy_loss_type == "gspo", "it reads totals, which OAR keeps; allowed: the others"),
        ("algo.advantage.estimator", advantage.estimator == "gae", "its critic credits tokens; allowed: group_norm, rloo, ..."),
        ("algo.advantage.gamma", advantage.estimator == "reinforce" and advantage.gamma != 1, "it changes totals; allowed: 1"),
        ("algo.kl.init_coef", kl.init_coef > 0 and not kl.use_loss,
         "KL in the reward gives each token its own, and a total would not be kept; allowed: --algo.kl.use_loss with it, or 0"),
    ]  # fmt: skip
    faults = [f"--{key}={attrgetter(key)(args)}: {why}" for key, wrong, why in refused if wrong]
    if base := settings.get("base_estimator"):
        faults.append(f"{OPTION}.base_estimator={base}: that is --algo.advantage.estimator; allowed: leave it out")
    if config.offloads:
        faults.append(f"{OPTION}.perturbation.backend=rollout: its engines score nothing; allowed: actor")
    if (share := config.amortize.share) is not None:
        faults.append(f"{OPTION}.amortize.share={share:g}: nothing is predicted here; allowed: null")
    if faults:
        raise OarConfigError("\n".join(faults))
    return config
