"""The second `verl.plugins` entry point: keeps old module names importable for copied recipes and older runs.

`import verl` loads this module in every process, so at first it imports only the standard library and wrapt.
"""

import importlib
import sys
import traceback
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    f"oar_plugin.hosts.verl.{name}": f"oar_plugin.runs.{name}"
    for name in ("run_folder", "best_checkpoint", "reward", "recipe")
} | dict.fromkeys(("oar_plugin.hosts.verl.keys", "oar_plugin.runs.keys"), "oar_plugin.runs.recipe")
"""Old module name -> new module name, for the modules that recipes refer to."""
_HYDRA_CONF = "oar_plugin.hosts.verl.hydra_conf"  # `KeepRun` was defined there


class MovedModules(MetaPathFinder, Loader):
    """Import hook: importing an old name returns the module with the new name, the same object."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which Python has replaced with a spec for the old name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _add_keep_run(hydra_conf: Any) -> None:
    def attribute(name: str) -> Any:
        if name != "KeepRun":
            raise AttributeError(f"module {_HYDRA_CONF!r} has no attribute {name!r}")
        return importlib.import_module("oar_plugin.runs.run_folder").KeepRun

    hydra_conf.__getattr__ = attribute


def load() -> None:
    """Register the old names once. Errors are only printed, because most runs do not use the old names."""
    if any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        return
    try:
        import wrapt

        sys.meta_path.append(MovedModules())
        wrapt.register_post_import_hook(_add_keep_run, _HYDRA_CONF)
    except Exception:
        print("oar_plugin: cannot register its old module names; recipes that use them will fail:", file=sys.stderr)
        traceback.print_exc()


def with_new_names(setting: Any) -> Any:
    """Return a setting in which new module names replace the old ones, in strings and in lists."""
    if isinstance(setting, list):
        return [with_new_names(each) for each in setting]
    if isinstance(setting, str):
        for old, new in MOVED.items():
            setting = setting.replace(old, new)
    return setting


load()
