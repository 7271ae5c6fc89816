"""Separators of multi-valued text columns: checked, and inferred from sampled values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meseta.data.schema.infer import MISSING_TEXTS, are_times, format_examples, parse_number
from meseta.spec import MesetaError

# Characters that separate values, most likely first. A value may contain those of the later groups.
_CANDIDATES = ("|;\t^~\x01\x02\x03", ",", "/", " ")
# A separator of an earlier group occurs in at least this share of the texts with the most frequent candidate.
_MIN_RELATIVE_SHARE = 0.01
_BRACKETS = ("[]", "()", "{}")


def invalid_separator_reason(separator: str) -> str | None:
    """Return the rule that a separator breaks, or `None`."""
    if len(separator) == 1 and separator.isascii() and separator not in '"\r\n':
        return None
    return "must be one ASCII character, and not a quote or a line break"


def infer_separator(texts: Sequence[str]) -> str | None:
    """Return the most likely separator of the values in `texts`, or `None` if they contain no candidate."""
    counts = {sign: sum(sign in text.strip() for text in texts) for signs in _CANDIDATES for sign in signs}
    most = max(counts.values())
    best_signs = (max(signs, key=lambda sign: counts[sign]) for signs in _CANDIDATES)  # The first one wins a tie.
    return next((sign for sign in best_signs if counts[sign] > _MIN_RELATIVE_SHARE * most), None)


def resolve_separators(
    where: str, requested: Mapping[str, str | None], columns: Mapping[str, Sequence[str]]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return (separators, reasons for the role) of the columns that --multi-valued selects.

    `columns` has sampled values as texts. A separator of `None` is inferred from them. Raises MesetaError with the
    prefix `where` if it cannot be inferred.
    """
    separators: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for name, separator in requested.items():
        texts = [text for text in columns[name] if text not in MISSING_TEXTS]
        separators[name] = separator or _require_separator(where, name, texts)
        parts = [part for text in texts for part in text.split(separators[name]) if part]
        origin = "inferred" if separator is None else "as --multi-valued says"
        is_single = texts and not any(separators[name] in text for text in texts)
        examples = f"no sampled text has two: {format_examples(parts)}" if is_single else format_examples(parts)
        reasons[name] = f"values separated by {separators[name]!r}, {origin}" + (f": {examples}" if texts else "")
    return separators, reasons


def _require_separator(where: str, name: str, texts: Sequence[str]) -> str:
    separator, remedy = infer_separator(texts) if texts else None, f"name it, as in --multi-valued '{name}=|'"
    if not texts:
        problem = "no sampled row has a value"
    elif all(parse_number(text) is not None for text in texts):
        problem = f"its values are single numbers: {format_examples(texts)}"
        remedy = f"leave it out of --multi-valued, or {remedy}"
    elif are_times(texts):
        problem = f"its values are times: {format_examples(texts)}"
        remedy = f"leave it out of --multi-valued, or {remedy}"
    elif all(text[0] + text[-1] in _BRACKETS for text in texts):
        problem = f"its values have brackets: {format_examples(texts)}"
        remedy = "write a|b in place of [a, b], or lists in JSON lines or Parquet"
    elif separator is None:
        problem = f"no usual separator occurs in its values: {format_examples(texts)}"
    else:
        return separator
    raise MesetaError(f"{where}: cannot infer the separator of {name!r} for --multi-valued: {problem}; {remedy}")
