"""What importance costs, measured: `oar bench step`.

`models` builds the model and the batch, `passes` holds what an RL step does with them, `published` the procedure that
ours is compared with, `memory` counts live bytes, `step` runs everything side by side and `report` writes it down.
"""
