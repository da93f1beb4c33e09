"""Scores masked copies of responses inside a vLLM engine: only there are the full logits at hand."""
