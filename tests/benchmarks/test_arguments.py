"""Refused arguments: the option, its value and the reason are named, and nothing is measured."""

import pytest

from benchmarks.__main__ import main

REFUSED = {
    "nothing": "there is no study 'nothing'; allowed: step, count,",
    "step --rounds 0": "--rounds 0: must be at least 1",
    "step --size 3b": "--size 3b: allowed: tiny, 1m",
    "step --scored-share 0": "--scored-share 0.0: must be in (0, 1]",
    "step --importance magic": "--importance magic: unknown; allowed: fisher",
    "step --importance oar_p": "--importance oar_p: it runs masked copies, not measured here; allowed: fisher",
    "step --answer-length 600 --size tiny": "no room",
    "run --rounds 0": "--rounds 0: must be at least 1",
    "run --scored-share 0.3": "--scored-share 0.3: must be in (0, 1] and make a whole number of the 4 prompts",
    "run --scored-share 0": "--scored-share 0.0: must be in (0, 1]",
    "run --importance magic": "--importance magic: unknown; allowed: fisher",
    "run --n 1": "--n 1: must be at least 2",
    "run --size tiny": "--size tiny: allowed: 1m,",
    "run --micro-batch 5": "--micro-batch 5: must divide the 16 responses",
    "run --response-length 16": "--response-length 16: must be at least 32",
    "run --prompt-length 4": "--prompt-length 4: must be at least 8",
    "offload --size tiny": "--size tiny: allowed: 1m, 10m",
    "offload --copies-at-most 0": "--copies-at-most 0: must be at least 1",
    "offload --size 1m --response-length 8": "no room",
    "scaling --processes 0": "--processes 0: must be at least 1",
    "scaling --importance oar_p": "--importance oar_p: it runs masked copies",
    "scaling --layout ddp": "--layout ddp: allowed are fsdp:data=N,sequence=N and megatron",
    "scaling --layout fsdp:tensor=2": "--layout fsdp:tensor=2: allowed are",
    "scaling --layout fsdp:data=0": "--layout fsdp:data=0: allowed are",
    "scaling --layout fsdp:data": "--layout fsdp:data: allowed are",
    "scaling --layout fsdp:data=3": "--responses 16: fsdp:data=3 cannot share them evenly",
    "scaling --launcher none": "--launcher none: needs --runs",
    "fidelity --models 0": "--models 0: must be at least 1",
    "fidelity --dtypes float32 float32": "--dtypes float32 float32: give float32, bfloat16, or both, each once",
    "fidelity --tasks nothing": "--tasks nothing: allowed: parallel",
    "learning --plan nothing": "--plan nothing: there is no such file; or one of ... judged, ... look",
    "learning --workers 0": "--workers 0: must be at least 1",
    "learning --plan look --part choose": "--part choose: this plan has one learning rate",
    "marks --tasks nothing": "--tasks nothing: allowed: parallel",
    "marks --models 0": "--models 0: must be at least 1",
    "learning --finished": "learning_runs holds no training of this plan; leave --finished out",
}
"""Arguments -> the message; ` ... ` stands for any text."""


@pytest.mark.parametrize("arguments", REFUSED)
def test_arguments_that_cannot_work_are_refused_by_name(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.learning.training.train", lambda *_: pytest.fail("trained"))
    assert main(arguments.split()) == 2
    said = " ".join(capsys.readouterr().err.split())
    for part in REFUSED[arguments].split(" ... "):
        assert part in said
        said = said.partition(part)[2]
    assert not list(tmp_path.rglob("*.*"))
