"""The code of README.md and of every page in docs/ runs and prints the stated output."""

import os
import subprocess
from pathlib import Path

import pytest

from forked import forking
from source_tree import ROOT

from . import run_page
from .forked_commands import forked_commands

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the page in a separate process, in a folder with the scripts and examples of a checkout."""
    work = folder / "work"
    work.mkdir()
    for name in ("benchmarks", "examples", "tools"):
        (work / name).symlink_to(ROOT / name)
    out, err = folder / "out.txt", folder / "err.txt"
    process = forking().Process(target=_run_page, args=(page, work, folder / "commands", out, err))
    process.start()
    process.join(280)
    process.kill()
    process.join()
    return subprocess.CompletedProcess([str(page)], process.exitcode or 0, out.read_text(), err.read_text())


def _run_page(page: Path, folder: Path, commands: Path, out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    with forked_commands(commands) as programs:
        os.environ["PYTHON_EXEC"] = str(programs / "python")  # of the ranks of torchrun
        run_page.main(page, programs)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.docs] * (page.name != "README.md"))
        for page in PAGES
    ],
)
def test_page(page: Path, tmp_path: Path) -> None:
    ended = run(page, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr


GOOD = """
```python
x = 2
```
Words between blocks.
```python
print(x + 1)  # -> 3
```
```bash run
echo "a" > made.txt; cat made.txt
```
```text
a
```
```python
print(open("made.txt").read(), "and more")
```

```text
a
 and ...
```
```bash
exit 1
```
```python no-run
raise SystemExit("not run")
```
"""


def test_a_good_page_passes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(GOOD)
    ended = run(page, tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nprint(1)  # -> 2\n```\n", "page.md:2: the page promises\n2"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "page.md:2: the page promises\n2"),
        ("words\n\n```python\nx = 1\nx.nothing\n```\n", 'page.md", line 5'),
        ("```bash run\nfalse\ntrue\n```\n", "page.md:2: exit code 1"),
        ("```python\nx = 1\n", "line 1: the block is never closed"),
    ],
)
def test_a_bad_page_fails_and_names_its_line(text: str, message: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    ended = run(page, tmp_path)
    assert ended.returncode != 0
    assert message in ended.stderr
