"""The second `verl.plugins` entry point: keeps the module names alive that copied recipes and older runs use.

`import verl` loads this module in every process. It imports only the standard library at its top, and a module of `runs/` only
when somebody asks for its old name.
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
    for name in ("run_folder", "best_checkpoint", "reward", "recipe", "keys")
}
"""Old name -> new name of each module that hosts or recipes refer to."""
_HYDRA_CONF = "oar_plugin.hosts.verl.hydra_conf"  # had `KeepRun`


class MovedModules(MetaPathFinder, Loader):
    """Imports the module of the new name under its old name; both names are one module object."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which Python has replaced by the one of the old name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _add_keep_run(hydra_conf: Any) -> None:
    def attribute(name: str) -> Any:
        if name != "KeepRun":
            raise AttributeError(f"module {_HYDRA_CONF!r} has no attribute {name!r}")
        return importlib.import_module("oar_plugin.runs.run_folder").KeepRun

    hydra_conf.__getattr__ = attribute


def load() -> None:
    """Register the old names, once. Raises nothing: runs that do not use them must not end."""
    if any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        return
    try:
        import wrapt

        sys.meta_path.append(MovedModules())
        wrapt.register_post_import_hook(_add_keep_run, _HYDRA_CONF)
    except Exception:
        print("oar_plugin: the old names of its modules are not available to recipes:", file=sys.stderr)
        traceback.print_exc()


def with_new_names(setting: Any) -> Any:
    """Return a setting with the old module names in its texts replaced by the new ones."""
    if isinstance(setting, list):
        return [with_new_names(each) for each in setting]
    if isinstance(setting, str):
        for old, new in MOVED.items():
            setting = setting.replace(old, new)
    return setting


load()
