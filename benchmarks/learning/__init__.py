"""Does a model learn faster with reshaped credit? Small models learn small tasks, all methods from the same start.

The tasks are made up so that the tokens that decide the answer are known; problems and sampling noise are the same for all
methods; everything about credit is the package's own code. One process, no downloads: a warm model takes about two
minutes and is kept, a run of 40 steps 10 to 40 seconds. Every finished run is a file in --results and is not repeated:
stop at any time, and go on with the same command. Learning rates are chosen on other seeds than methods are judged on.

examples:
  python -m benchmarks learning --tasks parallel --methods grpo fisher --seeds 0 --steps 20       (a first look)
  python -m benchmarks learning --tasks parallel chain --methods grpo random oracle fisher --steps 40
      --lr 3e-4 6e-4 1.2e-3 --choose-seeds 0 1 2 --seeds 3 4 5 6 7 8 --out DIR                    (a study)
  python -m benchmarks learning --tasks chain --methods grpo fisher --gate bi_level               (another gate)
  python -m benchmarks learning --variants --steps 40                                             (every setting that was run)
  python -m benchmarks learning --tasks chain --methods grpo onward --through-verl                (real verl, Ray and vLLM)
"""
