"""What predicted OAR-P is fitted to, on a language model: what stands in the masked place, how many labels, how long a unit.

Exact OAR-P replaces a token and looks what happens to the answer. A label is such a score; the others are predicted from hidden
states. Named before anything was scored:
  what stands in the place   `pad` (the model's own, which ends its turns), a separator of documents, a line break, a draw of
                             the model's own, and a token from another place of the batch, drawn anew for each label. Each
                             against the mean of the other kinds: overlap of the top 20 %, and correlation beyond position
  labels                     regressions on 128 to 8,192 labels, with 2, 4, 8, 16 units of a response and whole ones, judged on
                             responses that they were not fitted on: against exact scores with the same replacement, and against
                             the mean of the kinds that they were not fitted with. Beside them: `fisher`, position, and a
                             regression without hidden states
  how long a unit            units of 1, 4, 8, 16 tokens of long texts in float32 and bfloat16: where rounding drowns them

examples:
  python -m benchmarks labels --questions gsm8k.jsonl --texts math.jsonl --folder parts --out DIR
  python -m benchmarks labels --questions gsm8k.jsonl --texts math.jsonl --folder parts --collect    what there is by now
"""
