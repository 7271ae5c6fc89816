"""The site: every page has its place, the config and the public names are all there, and nothing is fetched."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from meseta.config.keys import all_keys
from source_tree import ROOT

pytest.importorskip("mkdocs", reason="the docs extra is not installed")
sys.path.insert(0, str(ROOT / "tools" / "site"))
import pages
import reference

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from this tree."""
    out = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280, env=env)
    assert run.returncode == 0, run.stderr
    return out


def navigation() -> list[str]:
    """Pages that mkdocs.yml names."""
    entries = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    found = [page for section in entries for group in section.values() for page in group]
    return [page if isinstance(page, str) else next(iter(page.values())) for page in found]


def test_every_page_has_its_place() -> None:
    named = navigation()
    assert len(named) == len(set(named))
    made = set(pages.outside_pages())
    assert {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} == set(named) - made
    assert made - set(named) == {name for name in made if name.startswith("examples/")}  # the hook appends these


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("index.md", "[a](../README.md#limits)", "[a](readme.md#limits)"),
        ("index.md", "[a](tour.md), [b](https://x.org/a.md)", "[a](tour.md), [b](https://x.org/a.md)"),
        ("readme.md", "[a](docs/tour.md) and [b](CONTRIBUTING.md)", "[a](tour.md) and [b](contributing.md)"),
        ("embedding.md", "[a](../examples/01_ten_lines.py)", "[a](examples/01_ten_lines.md)"),
        ("soak.md", "see [the test](../tests/ops/test_fuzz.py).", "see the test."),
        ("tour.md", "```python no-run\n[a](../README.md)\n```", "```python\n[a](../README.md)\n```"),
        ("tour.md", "```bash run\n```", "```bash\n```"),
    ],
)
def test_a_page_of_the_repository_on_the_site(name: str, text: str, shown: str) -> None:
    assert pages.on_site(text, name) == shown + "\n"


def test_nothing_is_fetched(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe|link)[^>]*\b(?:src|href)="([^"]*)"', page.read_text())
        assert loaded and not [target for target in loaded if re.match(r"(https?:)?//", target)], page


def test_public_names_and_keys_are_on_the_site(site: Path) -> None:
    for name, package in reference.packages().items():
        page = (site / "reference" / f"{name}.html").read_text()
        for public in reference.public_names(package):
            assert re.search(rf'<h2 id="[^"]*{public}" class="doc doc-heading">', page), (name, public)
    config = (site / "config.html").read_text()
    assert all(f"<code>{key.path.replace('<', '&lt;').replace('>', '&gt;')}</code>" in config for key in all_keys())


def test_pages_are_whole(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert "```" not in text and ":::" not in text, page
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert {"tour.html", "config.html", "reference/meseta.html"} <= {
        entry["location"].partition("#")[0] for entry in found
    }
