"""`meseta config [KEY]`: the keys of a config file, or an example file for a model."""

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
        typer.Option("--example", metavar="MODEL", help="Print a complete config file for a model, such as dlrm."),
    ] = None,
) -> None:
    """Print the keys of a config with their values, defaults and meanings."""
    if example is not None:
        from meseta.config.keys import example_config as text_of

        if key is not None:
            raise MesetaError(f"config: --example prints a complete file; omit the key {key!r}")
        typer.echo(text_of(example), nl=False)
        return
    from meseta.config.keys import find_keys, key_sections

    if key is not None:
        _print_keys(find_keys(key))
        return
    for title, keys in key_sections():
        typer.secho(f"{title}\n", underline=True)
        _print_keys(keys)


def _print_keys(keys: list[ConfigKey]) -> None:
    """Print each key with its type and default on one line and its meaning below."""
    from meseta.config.keys import strip_markdown

    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    for key in keys:
        default = strip_markdown(key.default)
        if default and not key.is_required:
            default = f"default {default}"
        facts = "; ".join(filter(None, (strip_markdown(key.kind), default)))
        typer.echo(f"{typer.style(key.path, bold=True)}: {facts}")
        typer.echo(textwrap.fill(key.full_text, width, initial_indent="    ", subsequent_indent="    ") + "\n")
