"""Rule for the delimiter of text files."""

from __future__ import annotations

MAX_DELIMITER_LENGTH = 8
"""Maximum number of characters of a delimiter."""


def invalid_delimiter_reason(delimiter: str) -> str | None:
    """Return the rule that the delimiter violates, or `None` if it is valid."""
    is_text = not any("\ud800" <= sign <= "\udfff" for sign in delimiter)
    if 0 < len(delimiter) <= MAX_DELIMITER_LENGTH and not set(delimiter) & set('"\r\n') and is_text:
        return None
    return f"must be 1 to {MAX_DELIMITER_LENGTH} characters without a quote or a line end"
