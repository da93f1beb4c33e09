"""The method: outcome-grounded token credit as pure functions on tensors (arXiv 2601.07408).

`answer` finds which tokens are the answer, `probe` reads the model's outcome distribution there, `importance/` holds one file
an importance, `gate` turns importance into weights, `diagnostics` says what the weights look like. Nothing here knows a
host. Shape suffixes: T tokens (packed), N rows of logits, B responses, L longest response, V vocabulary, H hidden size.
"""
