"""Measure the prose and the names of a source tree, list what breaks a rule, and draw samples for a blind reading.

    python tools/prose.py                                   the measures of this project and their required values
    python tools/prose.py --renames TABLE.csv               also the rows of a rename table that are not done
    python tools/prose.py --list tell-tale src/meseta/comm  each hit with its file, line and text
    python tools/prose.py --sample 60 7                     60 random docstrings with seed 7, one per line
    python tools/prose.py --sample-errors 60 7              60 random error messages
    python tools/prose.py --lower-limits                    lower the limits that tests/structure/test_prose.py holds

For another tree, such as site-packages with torchtitan, name its folder and its package: ROOT --package torchtitan.
Test files inside the package are left out.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from writing.limits import LIMITS, lower_limits
from writing.measures import (
    COMMENT_LINES,
    OTHER_FOLDERS,
    REQUIRED,
    Measure,
    Part,
    other_measures,
    package_measures,
    read_part,
    remaining_renames,
)
from writing.messages import MessageIndex
from writing.names import leftovers, repeated_classes
from writing.rules import TELL_TALE, begins_with_fragment, begins_with_question, lacks_verb
from writing.texts import DOCSTRINGS, KINDS, MESSAGES, Text

RENAME = "rename"
"""Kind of `--list` for the rows of the rename tables that are not done."""
MIN_ERROR_WORDS = 3
"""Error messages with fewer words are not sampled."""


def format_measures(measures: list[Measure]) -> list[str]:
    """Format a table of the measures and their required values."""
    width = max(len(measure.name) for measure in measures)
    lines = [f"{'':{width}}  {'value':>7}  required"]
    for measure in measures:
        required = ""
        if measure.name in REQUIRED:
            sign = ">=" if measure.name == COMMENT_LINES else "<="
            required = f"{sign} {REQUIRED[measure.name]:g}{'' if measure.is_met else ' !'}"
        value = f"{measure.value:.0f}" if float(measure.value).is_integer() else f"{measure.value:.1f}"
        lines.append(f"{measure.name:{width}}  {value:>7}  {required:8}  {measure.detail}".rstrip())
    return lines


def sample_docstrings(part: Part, count: int, seed: int) -> list[str]:
    """Draw docstrings of any kind, each in one line."""
    texts = sorted(" ".join(text.text.split()) for text in part.texts if text.kind in DOCSTRINGS)
    return random.Random(seed).sample(texts, min(count, len(texts)))


def sample_errors(part: Part, count: int, seed: int) -> list[str]:
    """Draw different error messages, each in one line, with `{name}` in place of an interpolated value."""
    messages = {" ".join(text.split()) for _, _, text in MessageIndex(part.modules).error_messages()}
    words = {text: re.findall(r"[^\W\d_]{2,}", re.sub(r"\{.*?\}", "", text)) for text in messages}
    texts = sorted(text for text in messages if len(words[text]) >= MIN_ERROR_WORDS)
    return random.Random(seed).sample(texts, min(count, len(texts)))


def _tell_tale_hits(part: Part) -> Iterator[str]:
    for text in part.texts:
        for hit in TELL_TALE.finditer(text.text):
            shown, line = text.text, text.line
            if text.kind not in MESSAGES:  # each line of the text is one of the file
                num_before = text.text.count("\n", 0, hit.start())
                shown, line = text.text.split("\n")[num_before], text.line + num_before
            yield f"{text.path}:{line}: {text.kind}: {hit.group()}: {' '.join(shown.split())}"


def _texts_that(part: Part, applies: Callable[[Text], bool]) -> Iterator[str]:
    for text in part.texts:
        if applies(text):
            yield f"{text.path}:{text.line}: {text.kind}: {' '.join(text.text.split())}"


def _functions_without_verb(part: Part) -> Iterator[str]:
    for module in part.modules:
        for docstring in module.docstrings:
            if docstring.kind == "function" and lacks_verb(docstring):
                text = " ".join(str(docstring.node.value).split())
                yield f"{module.path}:{docstring.node.lineno}: function: {text}"


LISTS: dict[str, Callable[[Part], Iterator[str]]] = {
    "tell-tale": _tell_tale_hits,
    "question": lambda part: _texts_that(part, lambda t: t.kind in DOCSTRINGS and begins_with_question(t.text)),
    "fragment": lambda part: _texts_that(part, lambda t: t.kind in DOCSTRINGS and begins_with_fragment(t.text)),
    "verb": _functions_without_verb,
    "leftover": lambda part: map(str, leftovers(part.modules)),
    "class": lambda part: map(str, repeated_classes(part.modules)),
}
"""What `--list` can list, besides all texts of a kind."""


def list_hits(kind: str, path: Path, folders: list[Path]) -> Iterator[str]:
    """Yield a line for each hit below `path`. Messages are searched for in the whole of `folders` that `path` is in."""
    folder = next((folder for folder in folders if path.is_relative_to(folder)), path)
    part = read_part(folder)
    part = part if path == folder else part.below(path)
    yield from LISTS[kind](part) if kind in LISTS else _texts_that(part, lambda text: text.kind == kind)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    kinds = ", ".join([*LISTS, RENAME, *KINDS])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "root", nargs="?", type=Path, default=Path(), help="folder of the project (default: the current one)"
    )
    parser.add_argument("--package", type=Path, default=Path("src"), help="folder below ROOT to measure (default: src)")
    parser.add_argument("--renames", nargs="+", type=Path, default=[], metavar="TABLE", help="rename tables to check")
    parser.add_argument("--list", nargs=2, metavar=("KIND", "PATH"), help=f"KIND: {kinds}")
    parser.add_argument("--sample", nargs=2, type=int, metavar=("N", "SEED"), help="print N random docstrings")
    parser.add_argument("--sample-errors", nargs=2, type=int, metavar=("N", "SEED"), help="print N random errors")
    parser.add_argument("--lower-limits", action="store_true", help=f"lower the limits in {LIMITS}")
    chosen = parser.parse_args(arguments)
    if not (chosen.root / chosen.package).exists():
        parser.error(f"{chosen.root / chosen.package} does not exist; name the folder to measure with --package")
    if chosen.list and chosen.list[0] not in (*LISTS, RENAME, *KINDS):
        parser.error(f"--list has no kind {chosen.list[0]!r}; choose one of {kinds}")
    if chosen.list and not Path(chosen.list[1]).exists():
        parser.error(f"--list: {chosen.list[1]} does not exist")
    return chosen


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    chosen = _arguments(arguments)
    root, package = chosen.root, chosen.root / chosen.package
    if chosen.lower_limits:
        lower_limits(root)
        return
    if chosen.list and chosen.list[0] != RENAME:
        folders = [package, *(root / folder for folder in OTHER_FOLDERS)]
        lines = list(list_hits(chosen.list[0], Path(chosen.list[1]), folders))
    else:
        part = read_part(package, with_tests=False)
        if chosen.list:
            lines = [line for line in remaining_renames(part, chosen.renames)[1] if line.startswith(chosen.list[1])]
        elif chosen.sample:
            lines = sample_docstrings(part, *chosen.sample)
        elif chosen.sample_errors:
            lines = sample_errors(part, *chosen.sample_errors)
        else:
            measures = package_measures(part)
            if chosen.renames:
                measures.append(remaining_renames(part, chosen.renames)[0])
            lines = format_measures(measures + other_measures(root))
    for line in lines:
        print(line)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this process without a traceback
    try:
        main()
    except SyntaxError as error:
        sys.exit(f"prose: {error.filename}, line {error.lineno} cannot be parsed: {error.msg}")
