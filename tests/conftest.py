"""Settings of every test: one thread for torch, no limit on an example's seconds, and a Ctrl-C that arrives."""

import gc
import signal

import hypothesis
import pytest
import torch
import yaml

from oar_plugin import output

gc.disable()  # until all modules are imported: what they make stays
yaml.SafeLoader = yaml.CSafeLoader  # Hydra reads forty files for each of verl's configurations
torch.set_num_threads(1)  # tests use tiny tensors, on which a second thread only costs time
hypothesis.settings.register_profile("here", deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile("here")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background job, and so in all that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = ["engine", "verl_run", "engine_scoring", "handshake", "offload_run", "smoke", "openrlhf"]


def pytest_collection_modifyitems(config, items):
    """Beside another worker (`-n 2 --dist loadfile`): what takes longest first, so that none is left over at the end."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        place = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: (place.get(item.path.name, len(place)), item.path not in slow))


def pytest_collection_finish():
    gc.enable()


@pytest.fixture(autouse=True)
def _warnings_are_heard(caplog):
    """Also those that a test before has logged, and after vLLM's API server, which raises the level of all handlers."""
    caplog.handler.setLevel(0)
    output._times.clear()


@pytest.fixture(scope="session")
def assets(tmp_path_factory, request):
    """The folder with model and data of smoke tests, which the first test that asks makes for all workers. To be copied."""
    from filelock import FileLock

    from recipes.smoke import make_assets

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "assets"
    folder.mkdir(exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "data.parquet").exists():  # written last
            make_assets(folder)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The engines' tests' model and tokenizer, saved."""
    from tests.hosts.engine import world

    path = tmp_path_factory.mktemp("model")
    world.make_model(path)
    return path


@pytest.fixture
def model(folder):
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(folder).eval()
