"""What importance costs and what it brings, measured: `oar bench step`, `perturbation`, `run`, `scaling` and `learning`.

Shared: `models` builds the model and the batch, `passes` holds what an RL step does with them, `published` the procedures that
ours are compared with, `memory` counts live bytes, `machine` describes where it runs, `targets` holds figures against limits.
`step` runs everything of the first command side by side, and `report` writes it down.
`perturbation` does so for the second, and `perturbation_report` writes it down: `responses` are the made ones, `scoring`
has the ways to score them, `engine` starts vLLM, `beside` measures generation while something is scored.
`run` starts whole runs of verl, and `run_report` writes them down: `run_assets` has the model, the prompts and the reward,
`run_trainer` is the trainer that verl loads, `run_steps` what the two sides agree on.
For `scaling`, `scaling` says which layouts are compared, `scaling_launch` starts the processes, `scaling_worker` is one of them
with verl's engine from `scaling_engine`, `scaling_report` writes it down, `scaling_arguments` is what command and worker share,
and `scaling_projection` asks the planner about more GPUs.
For `learning`, `reasoning` has tasks and small models, `learning_rollout` a batch of responses, `learning_credit` the methods,
`learning` trains, `learning_alignment` compares gradients without training, `learning_report` writes it down.
"""
