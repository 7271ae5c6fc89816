"""Every key of a run's config as tables of Markdown."""

from __future__ import annotations

from meseta.config.keys import key_sections


def markdown() -> str:
    """A heading and a table for every section."""
    parts = []
    for title, keys in key_sections():
        rows = "".join(f"| `{k.path}` | {_cell(k.kind)} | {_cell(k.default)} | {_cell(k.full_text)} |\n" for k in keys)
        parts.append(f"## {title}\n\n| key | values | default | |\n| --- | --- | --- | --- |\n{rows}\n")
    return '<div class="keys" markdown>\n\n' + "\n".join(parts) + "\n</div>\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
