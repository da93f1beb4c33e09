"""Measure what OAR costs a whole training step: real verl, Ray and vLLM, with GRPO's steps and OAR's in turn within one run, on
the same model and lengths; on one GPU where PyTorch sees any, else on the CPU. Builds a model with random weights; needs what
`oar doctor` lists for whole runs, and downloads nothing. verl takes one to three minutes to start, in each round anew.

Reported are the seconds of each phase of a step (generation, log-probs, importance, advantage, update, weight sync, rest)
and the ratio OAR / GRPO of whole steps: the median over pairs of neighbouring steps, with an interval that covers it at 95 %.
The target, for the default importance with half of the rows at zero advantage, is at most 1.10.

Responses have a fixed length, the learning rate is 0, and rewards do not depend on the text. If lengths, rewards or the share
of the rows that OAR scored differ from what was asked, no ratio is reported.

examples:
  python -m benchmarks run --size 1m --steps 3 --rounds 1             a first look, a few minutes
  python -m benchmarks run --steps 8 --control --out DIR              as the committed page was made, GRPO alone beside it
  python -m benchmarks run --size 1.5b --response-length 1024         on a GPU
  python -m benchmarks run --scored-share 1                           every row has an advantage: what OAR costs at most
  python -m benchmarks run --importance oar_g                         the paper's gradient estimator
"""
