"""Does a model learn faster with reshaped credit? Small models learn small tasks, all methods from the same start.

The tasks are made up so that the tokens that decide the answer are known, and which of them are wrong; problems and sampling
noise are the same for all methods; everything about credit is the package's own code. No downloads. A plan says beforehand
which methods are judged, on what, and which learning rates they have to choose from. A warm model takes a minute or two and is
kept; a training takes 10 to 15 seconds of a core. Every finished one is a file in --results and is not repeated: stop at any
time, and go on with the same command.

examples:
  python -m benchmarks learning --plan judged --workers 2 --out DIR        (the study; two hours on two cores)
  python -m benchmarks learning --plan rivals --out DIR                    (published methods at equal cost; an hour and a half)
  python -m benchmarks learning --plan my_plan.yaml                        (your own importance: python:MODULE:CLASS)
"""
