"""Where `write_report` was; it is in meseta.report."""

from meseta.report import write_report

__all__ = ["write_report"]
