"""From checkpoints to a table: `generate` writes responses, `grade` judges them, `statistics` says what they show."""
