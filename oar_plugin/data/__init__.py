"""Data of the recipes: `sources` says where they come from, `rows` what verl reads, `prepare` writes the files."""
