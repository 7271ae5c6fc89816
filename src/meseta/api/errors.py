"""Errors and hints of commands in the words of Python: arguments in place of options, and data in place of spooled
files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from meseta.data.schema.roles import COLUMN_OPTIONS
from meseta.spec import MesetaError

ARGUMENTS = {
    **{name: name for name in ("data", "schema", "nproc", "best")},
    **{name.replace("_", "-"): name for name in COLUMN_OPTIONS},
    **{f"{split}-{rule}": split for split in ("valid", "test") for rule in ("fraction", "after", "files")},
    **{name: name.replace("-", "_") for name in ("split-by", "bad-rows", "allow-unseen")},
}
"""Argument of a function by the name of the command-line option."""
FLAGS = {"best", "allow-unseen"}
"""Options without value."""
PHRASES = {
    "use --force to prepare it again and restart the run, choose": "choose",
    "omit --data to use it unchanged": "continue the run with meseta.open_run(run_dir).resume()",
    "start from the beginning with --force": "delete the run",
    "--schema file": "schema file",
    "--data data": "data",
}
"""Remedies that differ between a command and a function."""
HINTS = {
    " with --print-schema > schema.yaml, edit it, then run with --schema schema.yaml": ", with "
    "`--print-schema > schema.yaml`, writes one to edit and pass as schema",
    "--test-after TIME": "test=TIME",
    "--valid-fraction draws them, --valid-after sets the time": "a share as valid draws them, and a time sets their "
    "start",
    "append KEY=VALUE to the command": "pass it in config",
    "the same command": "the same call",
}
"""Hints that differ between a command and a function."""
_VALUE = r"'[^']*'|\d[\d.]*\b|skip\b|group\b|time\b"
_OPTION_NAME = re.compile(r"(?<![\w-])--(?P<name>[a-z]+(?:-[a-z]+)*)\b")
_OPTION = re.compile(rf"{_OPTION_NAME.pattern}(?: (?P<value>{_VALUE}))?")
_FIELD = re.compile(r"\bthe option (?P<name>\w+)")


def spooled_names(paths: Sequence[str], folder: Path, argument: str = "data") -> dict[str, str]:
    """Return the names of spooled files in errors, each with the name of the argument that the rows were passed as."""
    spooled = [path for path in paths if Path(path).parent == folder]
    return {old: argument for path in spooled for old in (f"source {path!r}", repr(path))}


@contextmanager
def argument_errors(function: str, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Context manager in which a MesetaError names arguments of `function` in place of options of the command.

    The keys of `names` are replaced by their values. Options without an argument are shown as those of `meseta train`.
    """
    try:
        yield
    except MesetaError as error:
        text = _as_arguments(function, str(error), names or {})
        if text == str(error):
            raise
        raise MesetaError(text) from None


def _as_arguments(function: str, text: str, names: Mapping[str, str]) -> str:
    for old, new in {**names, **PHRASES}.items():
        text = text.replace(old, new)
    if function == "fit":
        text = re.sub(r"^(prepare|train): ", "fit: ", text)
    # Commands in backticks keep their options.
    parts = text.split("`")
    parts[::2] = [_FIELD.sub(_argument_of_field, _OPTION.sub(_argument, part)) for part in parts[::2]]
    return "`".join(parts)


def as_hint(line: str) -> str:
    """Return a line that a command prints, with arguments of functions in place of options."""
    line = re.sub(r"--time (\S+) --test-after", r"time='\1' and --test-after", line)
    for old, new in HINTS.items():
        line = line.replace(old, new)
    # Commands in backticks keep their options.
    parts = line.split("`")
    parts[::2] = [_OPTION_NAME.sub(lambda match: ARGUMENTS.get(match["name"], match[0]), part) for part in parts[::2]]
    return "`".join(parts)


def _argument(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    if name not in ARGUMENTS:
        return f"`meseta train {match[0]}`"
    if name in FLAGS:
        return f"{ARGUMENTS[name]}=True"
    if value and value.isalpha():
        value = repr(value)
    return f"{ARGUMENTS[name]}={value or ''}"


def _argument_of_field(match: re.Match[str]) -> str:
    name = match["name"]
    return f"the argument {ARGUMENTS.get(name.replace('_', '-'), name)}"
