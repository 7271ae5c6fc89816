"""Former commands name those that replace them."""

import sys

import pytest

from meseta.cli.main import MOVED_COMMANDS, main


@pytest.mark.parametrize("command", MOVED_COMMANDS)
def test_a_moved_command_names_the_new_one(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["meseta", command, "--help"])
    with pytest.raises(SystemExit) as left:
        main()
    [line] = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert line.startswith(f"error: meseta {command}: moved; run '") and MOVED_COMMANDS[command] in line


def test_moved_commands_are_not_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["meseta", "--help"])
    with pytest.raises(SystemExit):
        main()
    words = capsys.readouterr().out.split()
    assert "train" in words and not set(MOVED_COMMANDS) & set(words)
