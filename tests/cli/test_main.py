"""The command line as a whole."""

from importlib.metadata import version

import pytest

from oar_plugin.cli.main import COMMANDS, IN_THE_CHECKOUT, main


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"usage: oar {command}" in capsys.readouterr().out


def test_it_says_its_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"oar_plugin {version('oar_plugin')}\n"


@pytest.mark.parametrize("command", ["trian", *IN_THE_CHECKOUT])
def test_another_command_is_refused_and_one_of_the_checkout_is_named(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command])
    assert exit_.value.code == 2
    assert IN_THE_CHECKOUT.get(command, "doctor") in capsys.readouterr().err
