"""From the repository's Markdown to the site's: links that leave docs/, and fences whose words mkdocs does not know."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^(\s*)```(\w+)( [\w-]+)+\s*$")
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def outside_pages() -> dict[str, Path]:
    """Pages of the site that are made of files outside docs/: name on the site -> file."""
    pages = {name.lower() + ".md": ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")}
    pages |= {f"examples/{path.stem}.md": path for path in sorted((ROOT / "examples").glob("*.py"))}
    return pages


def outside_page(path: Path) -> str:
    """The Markdown of a file outside docs/; a script becomes its text under its name."""
    text = path.read_text(encoding="utf-8")
    return f"# {path.name}\n\n```python\n{text}```\n" if path.suffix == ".py" else text


def on_site(markdown: str, name: str) -> str:
    """Return a page of the repository for the site, on which its path is `name`."""
    outside = outside_pages()
    folder = outside.get(name, DOCS / name).parent
    names = {path: page for page, path in outside.items()}
    lines, in_code = [], False
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
            lines.append(FENCE.sub(r"\1```\2", line))
        else:
            lines.append(line if in_code else LINK.sub(lambda match: _link(match, name, folder, names), line))
    return "\n".join(lines) + "\n"


def _link(match: re.Match[str], name: str, folder: Path, names: dict[Path, str]) -> str:
    """Return a link for the site, or only its text if the site does not have the target."""
    text, target, anchor = match[1], match[2], match[3] or ""
    if "://" in target:
        return match[0]
    path = Path(os.path.normpath(folder / target))
    if path in names:
        page = names[path]
    elif path.is_relative_to(DOCS) and path.exists():
        page = path.relative_to(DOCS).as_posix()
    elif folder.is_relative_to(DOCS) and not path.exists():
        return match[0]  # Another generated page.
    else:
        return text
    return f"[{text}]({os.path.relpath(page, os.path.dirname(name) or '.')}{anchor})"
