"""The code of README.md and of every page in docs/ runs and prints what the page says."""

import subprocess
import sys
from pathlib import Path

import pytest

from source_tree import ROOT

RUNNER = Path(__file__).with_name("run_page.py")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run_page(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """The page in a fresh interpreter, in a folder that sees examples/, as a reader in the checkout does."""
    (folder / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, str(RUNNER), str(page)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, tmp_path: Path) -> None:
    run = run_page(page, tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr


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
    run = run_page(page, tmp_path)
    assert run.returncode == 0, run.stderr


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
    run = run_page(page, tmp_path)
    assert run.returncode != 0
    assert message in run.stderr
