"""What does credit mark? Weights of wrong and right results, filler and form, under every kind of credit.

No training: the warm models of `learning` write responses, and each credit scores those whose group has an advantage. It is
known which of their tokens are results, and which of these are wrong.

Reported for each credit:
  wrong AUC     how often a wrong result is above another token of its response; 0.5 is chance
  first hit     share of wrong responses whose highest token stands in the step with the first wrong result
  results AUC   how often a result, right or wrong, is above another token of its response
  weights       what the gate two_level gives to each kind of token

`--by people` needs a model: it reads solutions of competition problems whose first wrong step people marked.
Reported: how importances rank that step's tokens against those before it, and whether the largest is in it.

examples:
  python -m benchmarks marks --tasks chain --models 1 --batches 1     a first look
  python -m benchmarks marks --out DIR                                three tasks, two models each
  python -m benchmarks marks --by people --model smollm2 --solutions 40              a look; all 444 are for a GPU
"""
