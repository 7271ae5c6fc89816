"""`meseta config [KEY]`: the keys of a config file, or an example file."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from meseta.errors import MesetaError

if TYPE_CHECKING:
    from meseta.config.keys import ConfigKey

MAX_WIDTH = 120


def config(
    key: Annotated[
        str | None,
        typer.Argument(help="A key, a section, a pattern such as '*.lr', or a part of a key.", show_default="all"),
    ] = None,
    example: Annotated[
        str | None,
        typer.Option(
            "--example",
            metavar="NAME",
            help="Print an example: a model, such as dlrm, for all its keys, or a file, such as main. list: all names.",
        ),
    ] = None,
) -> None:
    """Print the keys of a config with their values, defaults and meanings."""
    if example is not None:
        if key is not None:
            raise MesetaError(f"config: --example prints a complete file; omit the key {key!r}")
        _print_example(example)
        return
    from meseta.config.keys import find_keys, key_sections

    if key is not None:
        _print_keys(find_keys(key))
        return
    for title, keys in key_sections():
        typer.secho(f"{title}\n", underline=True)
        _print_keys(keys)


def _print_example(name: str) -> None:
    """Print the example `name`, or the names of all examples if it is 'list'."""
    from meseta.config.example_files import example_text, file_examples, model_examples

    if name != "list":
        typer.echo(example_text(name), nl=False)
        return
    for title, examples in (
        ("Models: configs with all keys", model_examples()),
        ("Files: configs and schemas", file_examples()),
    ):
        typer.secho(f"{title}\n", underline=True)
        for one, text in examples:
            typer.echo(typer.style(one, bold=True))
            _print_indented(text)


def _print_keys(keys: list[ConfigKey]) -> None:
    """Print each key with its type and default on one line and its meaning below."""
    from meseta.config.keys import strip_markdown

    for key in keys:
        default = strip_markdown(key.default)
        if default and not key.is_required:
            default = f"default {default}"
        facts = "; ".join(filter(None, (strip_markdown(key.kind), default)))
        typer.echo(f"{typer.style(key.path, bold=True)}: {facts}")
        _print_indented(key.full_text)


def _print_indented(text: str) -> None:
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    typer.echo(textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    ") + "\n")
