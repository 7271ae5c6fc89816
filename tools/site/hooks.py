"""Hooks of mkdocs: they add generated pages, and adapt the pages of the repository to the site."""

from __future__ import annotations

from typing import Any

import config_keys
import pages
import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

SCHEMA = "<!-- the keys, from src/meseta/config -->"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append examples and reference to the navigation."""
    sections = {title: entries for section in config.nav or [] for title, entries in section.items()}
    sections["Project"] += [name for name in pages.outside_pages() if name.startswith("examples/")]
    sections["Reference"] += [{name: f"reference/{name}.md"} for name in reference.packages()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for name, path in pages.outside_pages().items():
        files.append(File.generated(config, name, content=pages.outside_page(path)))
    for name, package in reference.packages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=reference.page(name, package)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return a page with links of the site and with the config keys."""
    markdown = pages.on_site(markdown, page.file.src_uri)
    return markdown.replace(SCHEMA, config_keys.markdown())
