"""Tests of the site: navigation, completeness of config keys and public names, offline search, and no external
resources. `make docs` runs those that build it."""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
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
    """Site built from this tree."""
    out = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280, env=env)
    assert run.returncode == 0, run.stderr
    return out


def navigation() -> list[list[str]]:
    """Return the pages of mkdocs.yml by section."""
    entries = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    sections = [group for section in entries for group in section.values()]
    return [[page if isinstance(page, str) else next(iter(page.values())) for page in group] for group in sections]


def test_every_page_has_its_place() -> None:
    named = [page for section in navigation() for page in section]
    assert len(named) == len(set(named))
    made = set(pages.outside_pages())
    assert {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} == set(named) - made
    assert made - set(named) == {name for name in made if name.startswith("examples/")}  # the hook appends these


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("index.md", "[a](../README.md#limits)", "[a](readme.md#limits)"),
        ("index.md", "[a](first_hour.md), [b](https://x.org/a.md)", "[a](first_hour.md), [b](https://x.org/a.md)"),
        ("readme.md", "[a](docs/doctor.md) and [b](CONTRIBUTING.md)", "[a](doctor.md) and [b](contributing.md)"),
        ("embedding.md", "[a](../examples/01_ten_lines.py)", "[a](examples/01_ten_lines.md)"),
        ("soak.md", "see [the test](../tests/ops/test_fuzz.py).", "see the test."),
        ("first_hour.md", "```python no-run\n[a](../README.md)\n```", "```python\n[a](../README.md)\n```"),
        ("first_hour.md", "```bash run\n```", "```bash\n```"),
    ],
)
def test_a_page_of_the_repository_on_the_site(name: str, text: str, shown: str) -> None:
    assert pages.on_site(text, name) == shown + "\n"


@pytest.mark.docs
def test_nothing_is_fetched(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe|link)[^>]*\b(?:src|href)="([^"]*)"', page.read_text())
        assert loaded and not [target for target in loaded if re.match(r"(https?:)?//", target)], page


@pytest.mark.docs
def test_pages_link_to_the_previous_and_next_page(site: Path) -> None:
    sections = [[name.replace(".md", ".html") for name in section] for section in navigation()]
    for first, second in (pair for section in sections for pair in pairwise(section)):
        for page, direction, target in ((first, "next", second), (second, "prev", first)):
            link = rf'<a href="{re.escape(target)}" class="md-footer__link md-footer__link--{direction}"'
            assert re.search(link, (site / page).read_text()), (page, target)


@pytest.mark.docs
def test_search_needs_no_server(site: Path) -> None:
    """A page from a folder can load scripts, but neither JSON nor workers."""
    script = (site / "search" / "search_index.js").read_text()
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert json.loads(script.removeprefix("var __index = ")) == index
    for page in site.rglob("*.html"):
        scripts = re.findall(r'<script src="([^"]*)"', page.read_text())
        start = "/" if page.name == "404.html" else "../" * (len(page.relative_to(site).parts) - 1)
        assert scripts[0] == f"{start}iframe-worker.js" and "/bundle." in scripts[1], page
    assert (site / "iframe-worker.js").exists()


@pytest.mark.docs
@pytest.mark.parametrize("page", ["index.html", "reference/meseta.html"])
def test_a_browser_searches_from_a_folder(site: Path, tmp_path: Path, page: str) -> None:
    browsers = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    browser = next((path for path in browsers if path), None)
    if browser is None:
        pytest.skip("no browser is installed")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    command = [browser, *options, "--virtual-time-budget=60000", f"{(site / page).as_uri()}?q=KeyedJaggedTensor"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    links = re.findall(r'<a href="([^"]*)" class="md-search-result__link"', shown)
    assert (site / "reference/meseta.html").as_uri() in {url.partition("?")[0] for url in links}


@pytest.mark.docs
def test_public_names_and_keys_are_on_the_site(site: Path) -> None:
    for name, package in reference.packages().items():
        page = (site / "reference" / f"{name}.html").read_text()
        for public in reference.public_names(package):
            assert re.search(rf'<h2 id="[^"]*{public}" class="doc doc-heading">', page), (name, public)
    config = (site / "config.html").read_text()
    assert all(f"<code>{key.path.replace('<', '&lt;').replace('>', '&gt;')}</code>" in config for key in all_keys())


@pytest.mark.docs
def test_pages_are_whole(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert "```" not in text and ":::" not in text, page
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert {"first_hour.html", "config.html", "reference/meseta.html"} <= {
        entry["location"].partition("#")[0] for entry in entries
    }
