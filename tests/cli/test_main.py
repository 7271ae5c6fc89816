"""Help of the root command, help texts of all commands, aliases and former commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.text import Text

from meseta.cli.main import ALIASES, COMMAND, COMMANDS, MOVED_COMMANDS

Run = Callable[..., tuple[int, str, str]]


def walk(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full name of each command, and the command."""
    yield name, command
    for child, subcommand in getattr(command, "commands", {}).items():
        yield from walk(subcommand, f"{name} {child}".strip())


@pytest.mark.parametrize("columns", [80, 120])
def test_commands_are_listed_in_groups(
    output_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    groups = re.split(r"╭─ (\w+) ─+╮\n", output_of("--help"))
    listed = {
        title: re.findall(r"^│ ([a-z]+) ", body, re.MULTILINE)
        for title, body in zip(groups[1::2], groups[2::2], strict=True)
        if title != "Options"
    }
    assert listed == {title: list(commands) for title, commands in COMMANDS.items()}
    assert list(listed) == ["Data", "Runs", "Plans", "Checkpoints", "Services"]


def test_square_brackets_remain_in_help_texts(output_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, command in walk(COMMAND):
        for text in (command.help, command.short_help, *(getattr(one, "help", None) for one in command.params)):
            # rich takes [a,b] for markup, unless a backslash precedes it.
            assert text is None or Text.from_markup(text).plain == text.replace("\\[", "["), (name, text)
    monkeypatch.setenv("COLUMNS", "120")
    assert "'key=[a,b,c]'" in output_of("sweep", "--help")


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_the_same_function(alias: str, name: str, output_of: Callable[..., str]) -> None:
    commands = dict(walk(COMMAND))
    assert inspect.unwrap(commands[alias].callback) is inspect.unwrap(commands[name].callback)
    assert f"Alias of `meseta {name}`." in output_of("--help")


def test_moved_commands_name_their_successor(run: Run) -> None:
    for command, successor in MOVED_COMMANDS.items():
        for arguments in ([], ["--help"], ["suite.yaml", "--out", "out"]):
            code, out, err = run(command, *arguments)
            [line] = err.splitlines()
            assert code == 2 and out == "" and line.startswith("error: ") and successor in line
    code, out, _ = run("--help")
    assert code == 0 and not set(MOVED_COMMANDS) & set(out.split())
