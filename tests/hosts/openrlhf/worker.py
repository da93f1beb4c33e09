"""One of two ranks with real DeepSpeed on a CPU, started by `ranks` with the folders of OpenRLHF and of the model.

With OpenRLHF's own ZeRO configuration of `--ds.zero_stage`. The optimizer is torch's AdamW, not DeepSpeed's.
"""

import json
from pathlib import Path

import deepspeed
import torch
from torch import distributed

from tests.hosts.openrlhf import batch
from tests.hosts.openrlhf.host import Host
from tests.processes import worker

RANKS = (0, 2), (3, 1)
"""Micro-batches of each rank. There is something to score in 0 and in 1: each time on one rank alone."""
CHECKPOINTED = ["--actor.gradient_checkpointing_enable"]
CASES = {
    "fisher": {},
    "oar_p": {"importance": "oar_p"},
    "checkpointed": {"words": CHECKPOINTED},
    "lora": {"lora": 4},
    "no scores": {"scores": False},
}
SHARDED = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
"""Of ZeRO-3: at 0 even a tiny model is gathered layer by layer, and let go at once."""


def weights(engine):
    parameters = [p for _, p in engine.module.named_parameters()]
    with deepspeed.zero.GatheredParameters(parameters, enabled=engine.zero_optimization_stage() == 3):
        return [p.detach().float().clone() for p in parameters]


def train(actor, samples):
    """A step of training; returns the weights behind it."""
    actor.train()
    log_probs = actor(samples.sequences, samples.action_mask, samples.attention_mask)
    actor.model.backward(-log_probs.mean())
    actor.model.step()
    return weights(actor.model)


def run(one, folder, stage, words=(), lora=0, scores=True, **settings):
    """Scores of this rank's micro-batches before and after a step of training, the weights after two of these, and which of
    them ZeRO-3 keeps whole.
    """
    given = json.dumps({"answer_patterns": ["hash"], **settings})
    args = one.args(*batch.words(folder, "--ds.zero_stage", str(stage), *words, *batch.PLUGIN, given))
    with one.here():
        sizes = {"train_batch_size": 4, "micro_train_batch_size": 2}
        config = one.strategy.DeepspeedStrategy(**sizes, zero_stage=stage, args=args).get_ds_train_config()
        config["zero_optimization"].update({f"stage3_{name}": 0 for name in SHARDED})
        more = {"target_modules": "all-linear", "lora_rank": lora} if lora else {}
        actor = one.models.Actor(str(folder), attn_implementation="sdpa", ds_config=config, temperature=0.7, **more)
        if args.actor.gradient_checkpointing_enable:
            actor.gradient_checkpointing_enable()
        adam = torch.optim.AdamW([p for p in actor.model.parameters() if p.requires_grad], lr=1e-2)
        actor.model = deepspeed.initialize(model=actor.model, optimizer=adam, config=config)[0]
        made = batch.maker(one, args, actor)
        samples = made.split_rollout_samples(batch.rollouts(one))
        inputs = made.advantage_plugin.actor_inputs(made, samples)
        policy, rank = made.actor_model_group.actors[0], distributed.get_rank()
        found = []
        for _ in range(2):
            for at in RANKS[rank] if scores else ():
                tensors = samples[at].sequences, samples[at].action_mask, samples[at].attention_mask
                found.append(policy.forward(*tensors, plugin_inputs=inputs[at]))
            after = train(actor, samples[rank])
        named = actor.model.module.named_parameters() if stage == 3 else ()
        return found, after, [name for name, parameter in named if parameter.ds_persist or parameter.numel()]


def main(site, folder):
    """By ZeRO stage and case, what `run` returns."""
    # DeepSpeed would compile a kernel for collectives; killed compilers leave a lock for which later ranks wait forever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    one = Host(Path(site))
    return {(stage, name): run(one, Path(folder), stage, **given) for stage in (2, 3) for name, given in CASES.items()}


if __name__ == "__main__":
    worker(main)
