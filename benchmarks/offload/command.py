"""`oar bench perturbation`: what counterfactual masking costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common_command import measure_and_report
from benchmarks.options import MODEL, add_fields, fields

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


def add(perturbation: argparse.ArgumentParser) -> None:
    from benchmarks.offload.measure import Settings
    from benchmarks.tiny.random_models import SHAPES

    perturbation.description, perturbation.epilog = _HELP, _EXAMPLES
    add_fields(perturbation.add_argument_group("model"), Settings, MODEL, size=list(SHAPES)[1:])
    batch = {
        "responses": "sequences",
        "response_length": "tokens each; several lengths are measured one after the other",
        "prompt_length": "tokens before them",
        "answer_length": "tokens in the box",
        "generating": "requests that generate at a time in the second table",
    }
    add_fields(perturbation.add_argument_group("responses"), Settings, batch)
    how = perturbation.add_argument_group("measurement")
    about = {
        "rounds": "rounds, after a short warm-up",
        "published_copies": "copies in one forward of p; on a CPU a few may be faster than many (default: all that fit into "
        "memory)",
        "threads": "CPU threads of torch and of vLLM",
        "seed": "of weights, responses and signs",
    }
    add_fields(how, Settings, about)
    how.add_argument(
        "--copies-at-most",
        type=_count_or_auto,
        metavar="N",
        help="run so many copies of each response, evenly spaced, and scale up, which the report then says; auto: as many "
        "as take about a minute a candidate and round (default: all of them)",
    )
    perturbation.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write perturbation_<device>_<size>.md, .json and, with matplotlib, .png there (default: only the terminal)",
    )


def run(args: argparse.Namespace) -> int:
    from benchmarks.offload import report as perturbation_report
    from benchmarks.offload.measure import Result, Settings, measure, steps

    def stem(result: Result) -> str:
        return f"perturbation_{result.machine['device']}_{settings.size}"

    settings = Settings(**fields(args, Settings))
    return measure_and_report("perturbation", settings, steps, measure, perturbation_report, stem, args.out)


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)
