"""Run the code of one page of documentation: `python tests/docs/run_page.py docs/first_hour.md` (in an empty folder).

    ```python           runs; all blocks of a page share one namespace
    ```bash run         runs, with `set -eu`; a plain ```bash is only shown
    ```python no-run    is only shown
    ```text             directly after a block that ran: its expected output; `...` matches anything

A line `print(x)  # -> 3` states one line of output, as a text block does.
"""

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

FENCE = re.compile(r"^```(.*)$")
ARROW = re.compile(r"#\s*->\s?(.*)$")


@dataclass(frozen=True)
class Block:
    """Fenced block: words after the fence, text, and first line on the page."""

    info: tuple[str, ...]
    text: str
    line: int
    expected: str | None = None
    """Output that the page promises."""

    @property
    def runs(self) -> bool:
        return self.info in (("python",), ("bash", "run"))


def blocks(page: str) -> Iterator[Block]:
    """Return the fenced blocks in order. A text block directly after a block becomes its `expected`."""
    pending: Block | None = None
    info: str | None = None
    body: list[str] = []
    start = 0
    for number, line in enumerate(page.splitlines(), start=1):
        fence = FENCE.match(line)
        if info is not None and fence:
            block = Block(tuple(info.split()), "\n".join(body) + "\n", start)
            info = None
            if block.info == ("text",) and pending is not None:
                yield replace(pending, expected=block.text)
                pending = None
                continue
            if pending is not None:
                yield pending
            pending = block
        elif fence:
            info, body, start = fence[1], [], number + 1
        elif info is not None:
            body.append(line)
        elif line.strip() and pending is not None:
            yield pending
            pending = None
    if info is not None:
        raise SystemExit(f"line {start - 1}: the block is never closed")
    if pending is not None:
        yield pending


def promised(block: Block) -> str | None:
    """Return the expected output, from the text block after it or from its `# ->` comments."""
    if block.expected is not None or block.info[0] != "python":
        return block.expected
    lines = [match[1] for line in block.text.splitlines() if (match := ARROW.search(line))]
    return "\n".join(lines) + "\n" if lines else None


def execute(block: Block, namespace: dict[str, object], page: Path) -> str:
    """Run one block and return its output."""
    if block.info[0] == "bash":
        command = ["bash", "-eu", "-o", "pipefail", "-c", block.text]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(f"{page}:{block.line}: exit code {run.returncode}\n{run.stdout}{run.stderr}")
        return run.stdout
    output = io.StringIO()
    # Empty lines in front make a traceback point at the page's own line.
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    with contextlib.redirect_stdout(output):
        exec(code, namespace)
    return output.getvalue()


def main(page: Path, commands: Path = Path(sys.executable).parent) -> None:
    """Run a page; `commands` is a folder of programs that shells find first."""
    sys.modules["__main__"] = ModuleType("__main__")  # the module name of a page's code
    namespace = vars(sys.modules["__main__"])
    checker = doctest.OutputChecker()
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    os.environ["PATH"] = f"{commands}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    os.environ.setdefault("PET_STANDALONE", "1")  # torchrun takes a free port: other pages may run meanwhile
    for block in blocks(page.read_text()):
        if not block.runs:
            continue
        got, want = execute(block, namespace, page), promised(block)
        if want is not None and not checker.check_output(want, got, options):
            raise SystemExit(f"{page}:{block.line}: the page promises\n{want}\nbut the code prints\n{got}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
