"""`oar bench perturbation`: what counterfactual masking costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from oar_plugin.cli.bench.common import SIZES, add_model, fields, measure_and_report

_HELP = """\
Measure what counterfactual masking costs (OAR-P: replace each reasoning token in turn, and see how far the answer moves),
against GRPO's step and against the published procedure. Builds a model with random weights; needs torch and transformers, no
verl, no download. Where vLLM is installed an engine is started for generation and for the copies that run on it.

Measured side by side, every candidate once a round, all on the same responses:
  g    GRPO's step: vLLM generates the responses (g1), log-prob forward (g2), update (g3)
  p    the published procedure: whole copies in one batch, float32 logits of all positions, no cache
  l    exact in the actor (algorithm.oar.importance=oar_p): the prefix is shared, only the answer's rows are projected
  l30  importance=hybrid: a gradient pass chooses the 30 % of the tokens that get a copy
  l8   exact, eight tokens a copy (perturbation.span=8)
  o    exact on an idle vLLM engine (perturbation.backend=rollout)
  o30  same with budget=0.3: blocks first, then the tokens of those that matter
  o8   same, eight tokens a copy
A second table has the tokens a second of a batch that is generated alone, and while a backlog of responses is scored
on the same engine: with copies let in for 15 % of the time (the default, share_while_generating), and without a limit.

How to read it: p / o is how many times faster the engine is than the published procedure; o of g is what exact importance would
add to a step if none of it were hidden behind generation; the second table says what hiding it costs generation.
Before anything is timed p, l and o score one response; where they disagree nothing is reported.
"""

_EXAMPLES = """\
examples:
  oar bench perturbation --size 1m --response-length 128              a minute or two on a laptop
  oar bench perturbation --size 10m --response-length 128 256 512     and how it grows with the length
  oar bench perturbation --size 0.1b --copies-at-most auto            a minute a candidate and round, scaled up
  oar bench perturbation --size 1.5b --dtype bfloat16 --device cuda   on a GPU (not tested)
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `oar bench perturbation`."""
    perturbation = commands.add_parser(
        "perturbation",
        help="cost of counterfactual masking (OAR-P), in the actor and on a vLLM engine, against GRPO's step and the "
        "published procedure",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = perturbation.add_argument_group("model")
    model.add_argument(
        "--size",
        default="10m",
        choices=SIZES,
        help="parameters, about (default: %(default)s)",
    )
    add_model(model, "4096 for 1m; 152064 for 7b; else 32000")
    batch = perturbation.add_argument_group("responses")
    batch.add_argument("--responses", type=int, default=4, help="sequences (default: %(default)s)")
    batch.add_argument(
        "--response-length",
        type=int,
        nargs="+",
        default=[512],
        metavar="TOKENS",
        help="tokens each; several lengths are measured one after the other (default: 512)",
    )
    batch.add_argument("--prompt-length", type=int, default=64, help="tokens before them (default: %(default)s)")
    batch.add_argument("--answer-length", type=int, default=8, help="tokens in the box (default: %(default)s)")
    batch.add_argument(
        "--generating",
        type=int,
        default=16,
        help="requests that generate at a time in the second table (default: %(default)s)",
    )
    how = perturbation.add_argument_group("measurement")
    how.add_argument("--rounds", type=int, default=3, help="rounds, after a short warm-up (default: %(default)s)")
    how.add_argument(
        "--copies-at-most",
        type=_count_or_auto,
        metavar="N",
        help="run so many copies of each response, evenly spaced, and scale up, which the report then says; auto: as many "
        "as take about a minute a candidate and round (default: all of them)",
    )
    how.add_argument(
        "--published-copies",
        type=int,
        metavar="N",
        help="copies in one forward of p; on a CPU a few may be faster than many (default: all, or what fits into memory)",
    )
    how.add_argument("--threads", type=int, default=2, help="CPU threads of torch and of vLLM (default: %(default)s)")
    how.add_argument("--seed", type=int, default=0, help="of weights, responses and signs (default: %(default)s)")
    perturbation.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write perturbation_<device>_<size>.md, .json and, with matplotlib, .png there (default: only the terminal)",
    )


def run(args: argparse.Namespace) -> int:
    """Run `oar bench perturbation`: see `oar_plugin.cli.bench.run`."""
    from oar_plugin.bench import perturbation_report
    from oar_plugin.bench.perturbation import Result, Settings, measure, steps

    def stem(result: Result) -> str:
        return f"perturbation_{result.machine['device']}_{settings.size}"

    settings = Settings(**{**fields(args, Settings), "response_length": tuple(args.response_length)})
    return measure_and_report("perturbation", settings, steps, measure, perturbation_report, stem, args.out)


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)
