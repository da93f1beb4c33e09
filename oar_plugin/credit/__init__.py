"""The method: outcome-grounded token credit as pure functions on tensors (arXiv 2601.07408).

`answer` finds which tokens are the answer, `probe` reads the model's outcome distribution there, `gradient` turns a
backward pass into importance, `reshape` turns importance into weights, `diagnostics` says what the weights look like.
Nothing here knows verl, Ray or transformers. Shape suffixes: T tokens (packed), N answer rows, B responses,
L longest response, V vocabulary, H hidden size.
"""
