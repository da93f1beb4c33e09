"""OpenRLHF's released sources, patched and not, in this process, with small stand-ins for what has no CPU build.

* `flash_attn`: its padding and gathering, made here of tensor indexing; attention itself is transformers' own (sdpa).
* `vllm`: OpenRLHF imports its engines beside the trainer; no test generates.
* `torch.cuda.current_device`: the CPU.
* `ray`: `get` and `put` are the identity, and a group of actors is a list of objects of the undecorated class.
"""

import importlib
import os
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
from torch.nn.functional import pad

VERSION = "0.11.2"
MODULES = {
    "maker": "trainer.ppo_utils.experience_maker",
    "experience": "trainer.ppo_utils.experience",
    "ppo_actor": "trainer.ray.ppo_actor",
    "models": "models",
    "asynchronous": "trainer.ppo_trainer_async",
    "trainer": "trainer.ppo_trainer",
    "cli": "cli.train_ppo_ray",
    "generator": "trainer.ppo_utils.samples_generator",
    "strategy": "utils.deepspeed.deepspeed",
}
"""Attributes of `Host`, and the modules of OpenRLHF that they are."""
ARGUMENTS = (
    "--reward.remote_url none --algo.kl.init_coef 0 --rollout.n_samples_per_prompt 4 --actor.num_gpus_per_node 2 "
    "--vllm.num_engines 1 --data.max_len 64"
)
CACHE = Path(__file__).parents[3] / "outputs" / "openrlhf"  # kept for the next time; git ignores it


def released() -> Path:
    """The wheel, from pip's index. It has no compiled part; its tags name the machine that it was built on."""
    if not (found := list(CACHE.glob(f"openrlhf-{VERSION}-*.whl"))):
        CACHE.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=CACHE) as folder:  # another worker may do the same
            words = ["download", "--no-deps", "--only-binary=:all:", "--python-version=3.11", "--implementation=cp"]
            words += ["--platform=manylinux1_x86_64", "--dest", folder, f"openrlhf=={VERSION}"]
            done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=300)
            if done.returncode and os.environ.get("CI") != "true":
                pytest.skip(f"openrlhf=={VERSION} cannot be had: {done.stderr[-300:]}")
            assert done.returncode == 0, done.stderr
            (wheel,) = Path(folder).iterdir()
            found = [wheel.replace(CACHE / wheel.name)]
    return found[0]


def unpack(folder: Path) -> Path:
    """A site-packages of its own."""
    with zipfile.ZipFile(released()) as wheel:
        for name in wheel.namelist():
            if name.endswith((".py", "METADATA")):
                target = folder / name.removeprefix(f"openrlhf-{VERSION}.data/purelib/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(wheel.read(name))
    return folder


def stand_ins() -> dict[str, ModuleType]:
    """By name. transformers and the like ask for `flash_attn` and `vllm` as well, and are imported before."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name in ("transformers.integrations.flash_attention", "peft", "deepspeed", "accelerate", "ray.util.queue"):
        importlib.import_module(name)
    made = {}

    def index_first_axis(x, indices):
        return x[indices]

    def unpad_input(x, mask):
        indices = mask.flatten().nonzero()[:, 0]
        return x.flatten(0, 1)[indices], indices, pad(mask.sum(-1).cumsum(0), (1, 0)), int(mask.sum(-1).max()), None

    def pad_input(x, indices, batch, length):
        full = x.new_zeros(batch * length, *x.shape[1:])
        return full.index_copy(0, indices, x).unflatten(0, (batch, length))

    def rearrange(x, pattern):
        assert pattern == "b s ... -> (b s) ..."
        return x.flatten(0, 1)

    def module(name, **content):
        made[name] = ModuleType(name)
        vars(made[name]).update(content)

    module("flash_attn")
    functions = (index_first_axis, pad_input, rearrange, unpad_input)
    module("flash_attn.bert_padding", **{function.__name__: function for function in functions})
    module("flash_attn.utils")
    module("flash_attn.utils.distributed", all_gather=None)
    module("vllm", SamplingParams=None)
    module("vllm.inputs", TokensPrompt=None)
    module("vllm.utils", random_uuid=None)
    return made


class Host:
    """OpenRLHF's modules from a folder, beside those of another one: `with host.here(): ...` makes them the ones that count."""

    def __init__(self, site: Path) -> None:
        self.site, self._modules = site, stand_ins()
        with self.here(), mock.patch.object(sys, "path", [str(site), *sys.path]):
            for attribute, name in MODULES.items():
                setattr(self, attribute, importlib.import_module(f"openrlhf.{name}"))
        assert Path(self.maker.__file__).is_relative_to(site)
        self.maker.ray = SimpleNamespace(get=lambda x: x, put=lambda x: x)
        self.Policy = self.ppo_actor.PolicyModelActor.__ray_metadata__.modified_class

    @contextmanager
    def here(self) -> Iterator[None]:
        others = _taken_out()
        sys.modules.update(self._modules)
        try:
            with mock.patch("torch.cuda.current_device", return_value="cpu"):
                yield
        finally:
            self._modules = _taken_out()
            sys.modules.update(others)

    def args(self, *words: str) -> SimpleNamespace:
        """What OpenRLHF's own command line makes of these words."""
        got = []

        def stop(args):
            got.append(args)
            raise SystemExit

        given = ["train", *ARGUMENTS.split(), *words]
        utils = self._modules["openrlhf.utils"]
        stops = mock.patch.object(utils, "get_strategy", stop)
        started = mock.patch("ray.is_initialized", return_value=True)
        with self.here(), mock.patch.object(sys, "argv", given), stops, started, pytest.raises(SystemExit):
            runpy.run_path(self.cli.__file__, run_name="__main__")
        return got[0]


def _taken_out() -> dict[str, ModuleType]:
    """Out of what Python has imported."""
    packages = {"openrlhf", "flash_attn", "vllm"}
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in packages}
