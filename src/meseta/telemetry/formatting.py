"""Numbers as people read them."""

from __future__ import annotations

import math

Number = int | float
"""A quantity to show: counts are whole, coordinates and metrics are not."""

NO_VALUE = "–"


def is_drawable(value: Number | None) -> bool:
    """Whether there is a value to draw: metrics may be null or nan, and a run that diverged gives absurd ones."""
    return value is not None and abs(value) < 1e30


def format_count(value: Number | None) -> str:
    """Whole number with thousands separated: 1,234,567."""
    return f"{value:,.0f}" if value is not None and math.isfinite(value) else NO_VALUE


def format_si(value: Number | None) -> str:
    """Three significant digits with a decimal prefix: 1.23M."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g}{suffix}" if abs(value) < factor * 999.5 else f"{value / factor:,.0f}{suffix}"
    return f"{value:.3g}"


def format_decimal(value: Number | None, decimals: int = 4) -> str:
    """A metric with fixed decimals; very large values, of a run that diverged, in powers of ten."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    return f"{value:.{decimals}f}" if abs(value) < 1e6 else f"{value:.{decimals}g}"


def format_bytes(value: Number) -> str:
    """Decimal units, as disks and devices are sold, with three significant digits: 1.20 GB."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            scaled = value / factor
            return f"{scaled:,.0f} {unit}" if scaled >= 999.5 else f"{scaled:#.3g}".rstrip(".") + f" {unit}"
    return f"{value:.0f} B"


def format_duration(seconds: Number | None) -> str:
    """3.2 s, 2 min 31 s, 5 h 12 min."""
    if seconds is None or not math.isfinite(seconds):
        return NO_VALUE
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_percent(value: Number | None) -> str:
    """A share as a percentage with two significant digits: 3.4%."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    percent = 100.0 * value
    decimals = 0 if percent >= 10 or percent == 0 else 1 if percent >= 1 else 2
    return f"{percent:.{decimals}f}%"


def format_quantity(amount: int, noun: str) -> str:
    """1 table, 2 tables."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def format_difference(value: Number, decimals: int = 4) -> str:
    """A difference with its sign: +0.0012; one that rounds to nothing but is not nothing in powers of ten."""
    if value == 0:
        return "="
    shown = f"{value:+.{decimals}f}"
    return shown if any(digit in shown for digit in "123456789") else f"{value:+.0e}"
