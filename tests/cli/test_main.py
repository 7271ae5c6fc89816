"""Former commands."""

from __future__ import annotations

from collections.abc import Callable

from meseta.cli.main import MOVED_COMMANDS

Run = Callable[..., tuple[int, str, str]]


def test_moved_commands_name_their_successor(run: Run) -> None:
    for command, successor in MOVED_COMMANDS.items():
        for arguments in ([], ["--help"], ["suite.yaml", "--out", "out"]):
            code, out, err = run(command, *arguments)
            [line] = err.splitlines()
            assert code == 2 and out == "" and line.startswith("error: ") and successor in line
    code, out, _ = run("--help")
    assert code == 0 and not set(MOVED_COMMANDS) & set(out.split())
