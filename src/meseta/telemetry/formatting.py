"""Formatting of numbers for reports and messages."""

from __future__ import annotations

import math

Number = int | float
NO_VALUE = "–"
"""Text for a missing or non-finite value."""


def is_drawable(value: Number | None) -> bool:
    """Whether a value can be drawn in a chart."""
    # Metrics may be nan, and huge after divergence of the loss.
    return value is not None and abs(value) < 1e30


def format_count(value: Number | None) -> str:
    """Format an integer with thousands separators, such as 1,234,567."""
    return f"{value:,.0f}" if value is not None and math.isfinite(value) else NO_VALUE


def format_si(value: Number | None) -> str:
    """Format three significant digits with an SI prefix, such as 1.23M."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g}{suffix}" if abs(value) < factor * 999.5 else f"{value / factor:,.0f}{suffix}"
    return f"{value:.3g}"


def format_decimal(value: Number | None, decimals: int = 4) -> str:
    """Format a metric with a fixed number of decimals. Very large values use exponents."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    return f"{value:.{decimals}f}" if abs(value) < 1e6 else f"{value:.{decimals}g}"


def format_bytes(value: Number) -> str:
    """Format bytes in decimal units with three significant digits, such as 1.20 GB."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            scaled = value / factor
            return f"{scaled:,.0f} {unit}" if scaled >= 999.5 else f"{scaled:#.3g}".rstrip(".") + f" {unit}"
    return f"{value:.0f} B"


def format_duration(seconds: Number | None) -> str:
    """Format a duration, such as 3.2 s, 2 min 31 s or 5 h 12 min."""
    if seconds is None or not math.isfinite(seconds):
        return NO_VALUE
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_percent(value: Number | None) -> str:
    """Format a share as a percentage with about two significant digits, such as 3.4%."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    percent = 100.0 * value
    decimals = 0 if percent >= 10 or percent == 0 else 1 if percent >= 1 else 2
    return f"{percent:.{decimals}f}%"


def format_quantity(amount: int, noun: str) -> str:
    """Format a count with its noun, such as 1 table or 2 tables."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def format_difference(value: Number, decimals: int = 4) -> str:
    """Format a difference with its sign, such as +0.0012."""
    if value == 0:
        return "="
    if abs(value) >= 1e6:
        return f"{value:+.{decimals}g}"
    # A small difference that rounds to zero is shown with an exponent.
    shown = f"{value:+.{decimals}f}"
    return shown if any(digit in shown for digit in "123456789") else f"{value:+.0e}"
