"""What we measure with. Not part of the installed package: run it from a checkout, `python -m benchmarks`."""
