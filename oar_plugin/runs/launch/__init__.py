"""Running a recipe where the GPUs are: `job` fills the templates of `recipes/cluster`, `wait` runs on the head node first."""
