"""A real language model: SmolLM2-135M-Instruct, which a Python package brings, and the problems that it is given."""
