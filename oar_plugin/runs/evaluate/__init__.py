"""From checkpoints to a table: `generate` writes responses, `grade` grades them, `table` estimates and prints."""


class EvaluationError(Exception):
    """An evaluation cannot continue. The message says what to do."""
