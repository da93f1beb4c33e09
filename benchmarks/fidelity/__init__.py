"""How well each importance agrees with exact OAR-P, and with the tokens that are known to decide the answer.

Exact OAR-P replaces every reasoning token, one at a time, and looks what happens to the model's answer. With `--model`
these are the responses of a language model to short and long problems. Without it, small models are trained on tasks whose
causal tokens are known (once, then kept on disk; two or three minutes a model on one core), and sample right and wrong ones.

Reported for each estimator:
  Spearman, top 20 %   agreement with exact OAR-P in float32: rank correlation, overlap of the 20 % largest scores
  beyond position      rank correlation without what a token's place in the response says
  causal recall        share of the known causal tokens among as many top scores
  itself               overlap with its own scores in float32: of those in bfloat16, of those with other signs, noise or draws
  forward, backward    passes through the layers, counted; and seconds over those of one plain forward

examples:
  python -m benchmarks fidelity --tasks parallel --models 1 --responses 16      a first look
  python -m benchmarks fidelity --out DIR                                       all tasks, three models each
  python -m benchmarks fidelity --also python:MODULE:CLASS                      with an importance of yours
  python -m benchmarks fidelity --model smollm2 --tasks words --responses 4     a language model
"""
