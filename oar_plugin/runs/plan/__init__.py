"""A plan of a recipe before it starts: memory by phase, hours, what OAR adds, whether it fits, and which keys to change."""
