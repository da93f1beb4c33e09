"""From checkpoints to a table: `generate` writes responses, `grade` judges them, `statistics` estimates, `table` prints."""
