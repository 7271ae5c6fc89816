"""The index links to every page, and relative links of pages name existing files."""

import re
from pathlib import Path

import pytest

from source_tree import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def targets(page: Path) -> list[Path]:
    """Return the files that the relative links of a page name."""
    return [page.parent / link for link in LINK.findall(CODE.sub("", page.read_text())) if "://" not in link]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_name_existing_files(page: Path) -> None:
    assert [str(target) for target in targets(page) if not target.exists()] == []


def test_every_page_is_in_the_index() -> None:
    linked = {target.resolve() for target in targets(DOCS / "index.md")}
    assert linked >= {page for page in DOCS.rglob("*.md") if page.name != "index.md"}
