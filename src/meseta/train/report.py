"""Old location of `write_report`, which is now in meseta.report."""

from meseta.report import write_report

__all__ = ["write_report"]
