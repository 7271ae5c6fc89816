"""Python code of the pages of documentation."""

from __future__ import annotations

import ast
import re

_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```[^\S\n]*$", re.MULTILINE | re.DOTALL)


def python_code(page: str) -> str:
    """Return the Python blocks of a page as one module whose line numbers are those of the page.

    A block that is no valid Python by itself, such as an excerpt, is left out.
    """
    lines = [""] * page.count("\n")
    for match in _BLOCK.finditer(page):
        if match[1].split()[:1] == ["python"] and _is_valid(match[2]):
            start = page.count("\n", 0, match.start()) + 1
            block = match[2].splitlines()
            lines[start : start + len(block)] = block
    return "\n".join(lines)


def _is_valid(block: str) -> bool:
    try:
        ast.parse(block)
    except SyntaxError:
        return False
    return True
