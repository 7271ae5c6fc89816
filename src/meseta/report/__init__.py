"""Self-contained HTML pages about one run, or several side by side, made from the files of their directories alone."""

from meseta.report.page import write_report

__all__ = ["write_report"]
