"""How well each importance agrees with exact OAR-P, and with the tokens that are known to decide the answer.

Exact OAR-P replaces every reasoning token, one at a time, and looks what happens to the model's answer. Small models are
trained on tasks whose causal tokens are known (once, then kept on disk; two or three minutes a model on one core), and sample
right and wrong responses.

Reported for each estimator:
  Spearman, top 20 %   agreement with exact OAR-P in float32: rank correlation, overlap of the 20 % largest scores
  causal recall        share of the known causal tokens among as many top scores
  forward, backward    passes through the layers, counted; and seconds over those of one plain forward

examples:
  python -m benchmarks fidelity --tasks parallel --models 1 --responses 16      a first look
  python -m benchmarks fidelity --out DIR                                       all tasks, three models each
  python -m benchmarks fidelity --also python:MODULE:CLASS                      with an importance of yours
"""
