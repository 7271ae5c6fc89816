"""Texts of a source tree: docstrings, comments, messages and pages, each with its kind, file and line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from writing.messages import ERROR, HELP, LOG, PRINT, RAISED, MessageIndex, literal_text
from writing.source import Module, parse

DOCSTRINGS = ("module", "class", "function", "field")
STUB = "stub"
"""Kind of the docstrings in .pyi files, which are those of C++ functions."""
COMMENT = "comment"
REPORT = "report"
"""Kind of the phrases in packages and modules that write reports or pages, unless they belong to a message."""
PHRASES = "phrase"
"""Kind of all other strings of several words."""
NATIVE_COMMENT, NATIVE_TEXT = "native-comment", "native-text"
"""Kinds of the comments of C++ files, and of their strings of several words."""
PAGE = "page"
MESSAGES = (RAISED, ERROR, HELP, LOG, PRINT, REPORT, PHRASES, NATIVE_TEXT)
KINDS = (*DOCSTRINGS, STUB, COMMENT, *MESSAGES, NATIVE_COMMENT, PAGE)

PYTHON_SUFFIXES = {".py", ".pyi"}
NATIVE_SUFFIXES = {".cpp", ".cc", ".cu", ".cuh", ".h", ".hpp"}
MARKED_SUFFIXES = {".sh", ".toml", ".yaml", ".yml"}
DIRECTIVE = re.compile(r"#\s*(!|type:|noqa|fmt:|ruff:|mypy:|pragma|pylint:|pyre-|yapf:|isort:|-\*-)")
PYTHON_TOKEN = re.compile(
    r'"{3}(?:\\.|[^\\])*?"{3}|'
    r"'{3}(?:\\.|[^\\])*?'{3}|"
    r'"(?:\\.|[^"\\\n])*"|'
    r"'(?:\\.|[^'\\\n])*'|(?P<comment>#[^\n]*)",
    re.DOTALL,
)
"""Strings, and comments outside of them. The tokenize module takes ten times as long."""
NATIVE_TOKEN = re.compile(
    r'R"(\w*)\((?P<raw>.*?)\)\1"|"(?P<text>(?:\\.|[^"\\\n])*)"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n]){1,4}\''
    r"|//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/",
    re.DOTALL,
)
MARKED_COMMENT = re.compile(r"(?:^|\s)(#(?!!).*)")
SEVERAL_WORDS = re.compile(r"(?:(?:^|\s)[(\"']?[^\W\d_]{2,}[,;:.?!)\"']*(?=\s|$)[^{}<>=]*?){3}")
REPORT_PATH = re.compile(r"(^|[/_])(report|page)s?([/_.]|$)")
"""Matched against the last three parts of a path."""


@dataclass(frozen=True)
class Text:
    """A docstring, comment or message."""

    kind: str
    path: Path
    line: int
    text: str
    """Without indentation. A message has `{expression}` in place of an interpolated value."""
    num_words: int
    """Without interpolated values."""


def _text(kind: str, path: Path, line: int, text: str) -> Text:
    return Text(kind, path, line, text, len(text.split()))


def files_below(folder: Path) -> list[Path]:
    """Return the files of a folder in a fixed order, or the file itself; hidden ones are left out."""
    if folder.is_file():
        return [folder]
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def parse_all(paths: Iterable[Path]) -> list[Module]:
    """Parse the Python files among `paths`."""
    return [parse(path) for path in paths if path.suffix in PYTHON_SUFFIXES]


def texts_of(paths: Iterable[Path], modules: Iterable[Module] | None = None) -> list[Text]:
    """Return all texts of the given files. `modules` are their Python files, if these are parsed already."""
    paths = list(paths)
    modules = parse_all(paths) if modules is None else list(modules)
    messages = MessageIndex(modules)
    texts = [text for module in modules for text in _texts_of_module(module, messages)]
    for path in paths:
        if path.suffix in NATIVE_SUFFIXES:
            texts += _native_texts(path)
        elif path.suffix in MARKED_SUFFIXES or path.name == "Makefile":
            texts += _marked_comments(path)
        elif path.suffix == ".md":
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            texts += [_text(PAGE, path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    return texts


def _texts_of_module(module: Module, messages: MessageIndex) -> Iterator[Text]:
    for docstring in module.docstrings:
        source = str(docstring.node.value)
        num_empty_lines = len(source) - len(source.lstrip("\n"))
        if cleaned := inspect.cleandoc(source):
            kind = STUB if module.path.suffix == ".pyi" else docstring.kind
            yield _text(kind, module.path, docstring.node.lineno + num_empty_lines, cleaned)
    yield from _comments(module)
    other = REPORT if REPORT_PATH.search("/".join(module.path.parts[-3:])) else PHRASES
    for node in module.strings:
        words, message_kind = literal_text(node), messages.kind(node)
        if message_kind is not None or SEVERAL_WORDS.search(words):
            text = literal_text(node, placeholder=None)
            yield Text(message_kind or other, module.path, node.lineno, text, len(words.split()))


def _comments(module: Module) -> Iterator[Text]:
    """Yield each comment that is not a directive of a tool."""
    line, position = 1, 0
    for token in PYTHON_TOKEN.finditer(module.text):
        line += module.text.count("\n", position, token.start())
        position = token.start()
        if token["comment"] is not None and not DIRECTIVE.match(token["comment"]):
            yield _text(COMMENT, module.path, line, token["comment"])


def _native_texts(path: Path) -> Iterator[Text]:
    """Yield the comments of a C++ file, and its strings of several words."""
    source = path.read_text(encoding="utf-8", errors="replace")
    for token in NATIVE_TOKEN.finditer(source):
        line = source.count("\n", 0, token.start()) + 1
        comment = token["line"] if token["line"] is not None else token["block"]
        string = token["raw"] or token["text"] or ""
        if comment is not None:
            yield _text(NATIVE_COMMENT, path, line, comment)
        elif SEVERAL_WORDS.search(string):
            yield _text(NATIVE_TEXT, path, line, string)


def _marked_comments(path: Path) -> Iterator[Text]:
    """Yield the comments of a file in which `#` begins one."""
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if comment := MARKED_COMMENT.search(line):
            yield _text(COMMENT, path, number, comment[1])
