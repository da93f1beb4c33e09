"""What reaches the nodes."""

import pytest

from oar_plugin.launch.environment import for_nodes, secrets

HERE = {
    "OAR_DATA": "/d",
    "NCCL_DEBUG": "INFO",
    "WANDB_API_KEY": "k",
    "HF_TOKEN": "t",
    "EDITOR": "vi",
    "WANDB_MODE": "offline",
}


def test_folders_hubs_and_libraries_go_everywhere_and_secrets_are_kept_apart():
    assert for_nodes(HERE) == {"OAR_DATA": "/d", "NCCL_DEBUG": "INFO", "WANDB_MODE": "offline"}
    assert secrets(HERE) == {"WANDB_API_KEY": "k", "HF_TOKEN": "t"}


def test_folders_of_this_machine_stay_here_where_nodes_have_others():
    assert for_nodes(HERE, paths=False) == {"NCCL_DEBUG": "INFO", "WANDB_MODE": "offline"}


def test_further_variables_by_name_or_with_a_value():
    assert for_nodes(HERE, ["EDITOR", "OAR_DATA=/e=f"])["EDITOR"] == "vi"
    assert for_nodes(HERE, ["OAR_DATA=/e=f"], paths=False)["OAR_DATA"] == "/e=f"


@pytest.mark.parametrize(
    ("entry", "message"), [("NOPE", "not set here"), ("HF_TOKEN", "a secret"), ("a b=1", "not a name")]
)
def test_one_that_cannot_be_is_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        for_nodes(HERE, [entry])
