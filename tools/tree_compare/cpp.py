"""Comparison of two versions of a C++ file by their tokens."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tree_compare.findings import Difference, Findings, Notice, fragment
from tree_compare.renames import RenameTable

_TOKEN = re.compile(
    r"""
    (?P<space>(?:[ \t\r\f\v]|\\\r?\n)+)
  | (?P<newline>\n)
  | (?P<comment>//(?:\\\r?\n|[^\n])*|/\*.*?\*/)
  | (?P<raw>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)")
  | (?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
  | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n])+')
  | (?P<number>\.?\d(?:'?[\w.]|(?<=[eEpP])[+-])*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<mark_>\#\#|<=>|->\*|\.\.\.|<<=|>>=|::|->|\+\+|--|&&|\|\||[-+*/%&|^=!<>]=|<<|>>|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_KEYWORDS = """
    alignas alignof auto bool break case catch char class const consteval constexpr constinit const_cast continue
    decltype default delete do double dynamic_cast else enum explicit extern false final float for friend goto if
    inline int long mutable namespace new noexcept nullptr operator override private protected public register
    reinterpret_cast return short signed sizeof static static_assert static_cast struct switch template this
    thread_local throw true try typedef typename union unsigned using virtual void volatile while
"""
KEYWORDS = set(_KEYWORDS.split())
# Statements and calls whose strings are messages.
JOINS = ("+", "<<", ",")
NO_TYPES = {"return", "throw", "new", "delete", "else", "case", "goto", "sizeof", "operator", "not"}
MESSAGE_STARTS = {"throw", "static_assert", "refuse", "fail", "throw_invalid_argument", "need"}


@dataclass(frozen=True)
class Token:
    """One token; `end` closes a preprocessor directive."""

    kind: str
    text: str
    line: int


def tokens(text: str) -> list[Token]:
    """Return the tokens of C++ code, without comments. Neighboring string literals are joined."""
    found: list[Token] = []
    line, in_directive, starts_line = 1, False, True
    for match in _TOKEN.finditer(text):
        kind, part = match.lastgroup or "", match[0]
        kind = {"mark": "raw", "mark_": "mark"}.get(kind, kind)
        if kind == "newline":
            if in_directive:
                found.append(Token("end", "\n", line))
            in_directive, starts_line = False, True
        elif kind not in ("space", "comment"):
            in_directive = in_directive or (starts_line and part == "#")
            starts_line = False
            last = found[-1] if found else None
            if kind == "string" and last is not None and last.kind == "string" and _prefix(part) == _prefix(last.text):
                found[-1] = Token("string", last.text[:-1] + part[len(_prefix(part)) + 1 :], last.line)
            else:
                found.append(Token(kind, re.sub(r"\\\r?\n", "", part) if kind != "raw" else part, line))
        line += part.count("\n")
    if in_directive:
        found.append(Token("end", "\n", line))
    return found


def _prefix(literal: str) -> str:
    return literal[: literal.index('"')]


def without_messages(found: list[Token]) -> list[Token]:
    """Remove the strings of messages, each with one operator or comma that joins it to the rest of its message."""
    kept: list[Token] = []
    is_inside = drops_next = False
    for index, token in enumerate(found):
        is_start = token.text in MESSAGE_STARTS and (not index or found[index - 1].text != "void")
        is_inside = (is_inside or is_start) and token.text != ";"
        if is_inside and token.kind == "string":
            if kept[-1].text in JOINS:
                kept.pop()
            else:
                drops_next = True
        elif not (drops_next and token.text in JOINS):
            kept.append(token)
            drops_next = False
        else:
            drops_next = False
    return kept


@dataclass
class Units:
    """Function bodies, with their headers, of one file."""

    of: list[int]
    """For each token the number of its function, or -1."""
    global_names: set[str]
    """Names outside of functions, and names of functions."""


class _UnitFinder:
    def __init__(self, found: list[Token]) -> None:
        self.found = found
        self.units = Units([-1] * len(found), set())
        self._num_units = 0

    def run(self) -> Units:
        start = index = 0
        while index < len(self.found):
            text = self.found[index].text
            if text == "{" and self._opens_function(start, index):
                end = self._end_of_block(index)
                while end < len(self.found) and self.found[end].text in (",", "{"):  # after `a_{b}` of a constructor
                    end = self._end_of_block(end)
                self._add(start, index, end)
                start = index = end
                continue
            if text in (";", "{", "}") or self.found[index].kind == "end":
                start = index + 1
            index += 1
        outside = zip(self.found, self.units.of, strict=True)
        self.units.global_names |= {token.text for token, unit in outside if unit < 0 and token.kind == "name"}
        return self.units

    def _opens_function(self, start: int, brace: int) -> bool:
        header = [token.text for token in self.found[start:brace]]
        if header[:1] == ["template"]:
            depth = 0
            for index, text in enumerate(header):
                depth += (text == "<") - (text == ">") - 2 * (text == ">>")
                if depth <= 0 and index > 0:
                    header = header[index + 1 :]
                    break
        first = next((text for text in header if text not in ("inline", "typedef", "static", "constexpr")), "")
        return "(" in header and first not in ("namespace", "class", "struct", "union", "enum", "extern")

    def _end_of_block(self, start: int) -> int:
        depth = 0
        for index in range(start, len(self.found)):
            text = self.found[index].text if self.found[index].kind == "mark" else ""
            depth += (text == "{") - (text == "}")
            if text == "}" and depth == 0:
                return index + 1
        return len(self.found)

    def _add(self, start: int, brace: int, end: int) -> None:
        self.units.of[start:end] = [self._num_units] * (end - start)
        self._num_units += 1
        opening = next(index for index in range(start, brace) if self.found[index].text == "(")
        self.units.global_names |= {token.text for token in self.found[start:opening] if token.kind == "name"}


@dataclass
class CppFile:
    """One version of a C++ file."""

    path: str
    tokens: list[Token]
    units: Units

    @classmethod
    def parse(cls, path: str, found: list[Token]) -> CppFile:
        return cls(path, found, _UnitFinder(found).run())


def compare_cpp(
    before: CppFile, after: list[Token], table: RenameTable, global_names: set[str], findings: Findings
) -> None:
    """Compare the tokens of a file, of which neither list has messages if these may change.

    `global_names` are the names of all C++ files before that are no local names.
    """
    pairs = _aligned(before, after, findings)
    maps: dict[tuple[int, bool, str, str], str] = {}
    for index, other in pairs:
        one, unit = before.tokens[index], before.units.of[index]
        place = (before.path, one.line, other.line, one.text, other.text)
        if one.kind == other.kind == "string" and one.text != other.text and table.explains_text(one.text, other.text):
            notice = Notice(before.path, other.line, "string changed", fragment(f"{one.text} became {other.text}"))
            findings.notices.add(notice)
        elif one.kind != "name" or other.kind != "name" or {one.text, other.text} & KEYWORDS:
            if (one.kind, one.text) != (other.kind, other.text):
                findings.refuse(Difference(*place, "different token"))
        else:
            is_member = index > 0 and before.tokens[index - 1].text in (".", "->", "::")
            forward = maps.setdefault((unit, is_member, "old", one.text), other.text)
            backward = maps.setdefault((unit, is_member, "new", other.text), one.text)
            if unit >= 0 and (forward != other.text or backward != one.text):
                reason = f"{one.text} has become both {forward} and {other.text}"
                if forward == other.text:
                    reason = f"{backward} and {one.text} have both become {other.text}"
                findings.refuse(Difference(*place, reason))
            elif one.text == other.text:
                continue
            elif table.explains(one.text, other.text):
                findings.renamed.add((one.text, other.text))
            elif unit < 0 or is_member or not _is_local(before, unit, one.text, global_names):
                findings.refuse(Difference(*place, f"rename {one.text} -> {other.text} is not in the table"))


def _aligned(before: CppFile, after: list[Token], findings: Findings) -> Iterator[tuple[int, Token]]:
    """Yield pairs of tokens, and refuse those that are only in one version."""
    if len(before.tokens) == len(after):
        yield from enumerate(after)
        return
    olds, news = (
        [token.text if token.kind == "mark" else token.kind for token in part] for part in (before.tokens, after)
    )
    for _, i, i_end, j, j_end in difflib.SequenceMatcher(None, olds, news, autojunk=False).get_opcodes():
        if i_end - i == j_end - j:
            yield from zip(range(i, i_end), after[j:j_end], strict=True)
            continue
        one, other = before.tokens[i:i_end], after[j:j_end]
        old_line, new_line = (part[0].line if part else 0 for part in (one, other))
        old, new = (fragment(" ".join(token.text for token in part)) for part in (one, other))
        findings.refuse(Difference(before.path, old_line, new_line, old, new, "tokens added or removed"))


def _is_local(file: CppFile, unit: int, name: str, global_names: set[str]) -> bool:
    """Whether a name of a function is declared in it, or at least nowhere outside of functions."""
    if name not in global_names:
        return True
    for index, token in enumerate(file.tokens):
        if file.units.of[index] == unit and token.text == name and 0 < index < len(file.tokens) - 1:
            previous, following = file.tokens[index - 1], file.tokens[index + 1]
            if previous.text == "&" and file.tokens[index - 2].text in ("(", ",", "=", "return"):
                continue  # the address of a function
            is_type = (
                previous.text not in NO_TYPES if previous.kind == "name" else previous.text in (">", "*", "&", "&&")
            )
            if is_type and following.text in ("=", ";", ",", ")", "{", "[", ":", ">"):
                return True
    return False
