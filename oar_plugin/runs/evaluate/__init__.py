"""From checkpoints to a table: `responses` has vLLM answer a set's problems, `table` grades, estimates and prints."""


class EvaluationError(Exception):
    """An evaluation cannot continue. The message says what to do."""
