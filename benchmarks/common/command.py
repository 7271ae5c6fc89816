"""Command lines of benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

from record import disable_recording

Part = Callable[[argparse.Namespace], bool]
"""Part of a benchmark, which returns whether its requirements are met."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Create a parser whose help is the docstring of a script."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, to which `--no-record` is added."""
    parser.add_argument("--no-record", action="store_true", help="do not append to benchmarks/results.csv")
    arguments = parser.parse_args()
    if arguments.no_record:
        disable_recording()
    return arguments


def run_parts(parser: argparse.ArgumentParser, parts: Mapping[str, Part]) -> None:
    """Run the part that the command line names, or all. Exits with code 1 if a requirement is missed."""
    parser.add_argument("part", nargs="?", choices=parts, help="(default: all)")
    options = parse_arguments(parser)
    good = True
    for part in [options.part] if options.part else parts:
        good &= parts[part](options)
    sys.exit(not good)
