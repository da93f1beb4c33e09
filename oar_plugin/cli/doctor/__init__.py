"""`oar doctor`: would a run start here, and if not, what to do.

Never dies of what it looks for: whatever imports a package is asked of a process of its own, with a time limit (`questions`,
`answers`).
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from oar_plugin.cli.doctor.host import examine_host
from oar_plugin.cli.doctor.machine import Machine
from oar_plugin.cli.doctor.packages import examine_packages
from oar_plugin.cli.doctor.questions import Answer, ask
from oar_plugin.cli.doctor.recipe import examine_data, examine_recipe, features_for, packages_for
from oar_plugin.output import say
from oar_plugin.runs.launch.finding import Finding

_HELP = """\
Say whether a run with OAR would start on this machine, and what to do where it would not: packages (do they import, was their
version tested), whether verl loads the plugin, which of OAR's features this verl and this vLLM have, GPUs and their memory.
Imports everything that a run imports: takes half a minute. Starts and changes nothing, needs no network.

  ok           in place
  note         worth knowing: not tested, or something that only other runs need
  not checked  cannot be seen from here: GPUs on a login node, say
  missing      a run would not start
"""
_EXAMPLES = """\
examples:
  oar doctor                                           verl's defaults: FSDP, the synchronous trainer, vLLM
  oar doctor --recipe qwen2_5_7b_math                  what this recipe needs (a name that `oar recipes` lists, or a folder):
                                                       GPUs and their memory by `oar plan`, data, model, reward, logger
  oar doctor --recipe mine trainer.n_gpus_per_node=4   with overrides, as on verl's command line
  oar doctor --json | jq -r '.findings[] | select(.level == "missing") | .subject'
  srun --ntasks-per-node=1 oar doctor --recipe qwen2_5_32b_megatron        on each node of a job: environments differ

exit status: 0 a run would start, 1 something is missing, 2 an argument cannot work, 3 nothing is missing, but not everything
could be checked here
"""
STATUS = {"ready": 0, "not ready": 1, "not checked": 3}
PYTHONS = ((3, 10), (3, 12))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _HELP, _EXAMPLES
    parser.add_argument("--recipe", metavar="RECIPE", help="check what this one needs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides for the recipe")
    parser.add_argument("--json", action="store_true", help="print verdict and findings as JSON, and nothing else")


def run(args: argparse.Namespace) -> int:
    from oar_plugin.runs.recipe import RecipeError, find_recipe

    try:
        if args.overrides and args.recipe is None:
            raise RecipeError(f"{args.overrides[0]}: overrides are those of a recipe; name one with --recipe")
        recipe = None if args.recipe is None else str(find_recipe(args.recipe))
    except RecipeError as error:
        say(f"oar doctor: {error}", sys.stderr)
        return 2
    findings = list(examine(recipe, args.overrides))
    levels = {finding.level for finding in findings}
    verdict = "not ready" if "missing" in levels else "not checked" if "not checked" in levels else "ready"
    if args.json:
        print(json.dumps({"verdict": verdict, "findings": [finding._asdict() for finding in findings]}, indent=1))
        return STATUS[verdict]
    _print_table(findings)
    say(_in_words(verdict, findings, args.recipe, args.overrides))
    return STATUS[verdict]


def examine(recipe: str | None = None, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """All findings, in the order a person would ask.

    Args:
        recipe: its folder; None for a run with verl's defaults.
        overrides: of its configuration.
    """
    if sys.stderr.isatty():
        say("oar doctor: imports what a run imports, a moment ...", sys.stderr)
    machine = Machine(ask("devices"))
    memory = "" if machine.memory_gib is None else str(machine.memory_gib)
    recipe_answer = Answer({}) if recipe is None else ask("recipe", recipe, memory, *overrides)
    needed = packages_for(recipe_answer.told, machine.on_cpu)
    yield from _guarded("Python", lambda: [_python()])
    yield from _guarded("packages", lambda: examine_packages(needed, machine.without_gpus))
    features, engine = features_for(recipe_answer.told), recipe_answer.told.get("engine", "vllm")
    yield from _guarded("verl", lambda: examine_host(ask("features"), features, engine, machine.without_gpus))
    yield from _guarded("GPUs", lambda: machine.examine(recipe_answer.told.get("share")))
    if recipe is None:
        yield from _guarded("data", lambda: [examine_data()])
    else:
        yield from _guarded("recipe", lambda: examine_recipe(recipe_answer, machine))


def _guarded(subject: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:  # what is looked at may be broken in any way
        yield Finding(subject, "not checked", f"the check itself failed: {type(error).__name__}: {error}")


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return Finding("Python", "ok", version)
    return Finding("Python", "missing", version, "verl and OAR need 3.10, 3.11 or 3.12")


def _print_table(findings: Sequence[Finding]) -> None:
    try:
        from rich.text import Text

        from oar_plugin.cli.tables import console, table
    except Exception:  # one of the findings says that it is missing or broken
        for subject, level, text, advice in findings:
            say(f"{level:12} {subject}: {text}{advice and f'  -> {advice}'}")
        return
    shown = table("", "what", "found", "what to do", title="oar doctor", title_justify="left")
    colours = {"ok": "green", "note": "yellow", "not checked": "magenta", "missing": "red"}
    for subject, level, text, advice in findings:
        shown.add_row(Text(level, colours[level]), subject, text, advice)
    console().print(shown)


def _in_words(verdict: str, findings: Sequence[Finding], recipe: str | None, overrides: Sequence[str]) -> str:
    def of(level: str) -> str:
        return ", ".join(dict.fromkeys(finding.subject for finding in findings if finding.level == level))

    if verdict == "not ready":
        return f"Not ready: {of('missing')}."
    if verdict == "not checked":
        return f"Nothing is missing, but this could not be checked here: {of('not checked')}."
    if recipe is not None:
        return f"Ready: oar launch {shlex.join([recipe, *overrides])}"
    return "Ready: add algorithm.adv_estimator=oar to your verl command."
