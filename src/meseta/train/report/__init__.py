"""One self-contained HTML page about one run, made from the files of its directory alone."""

from meseta.train.report.page import write_report

__all__ = ["write_report"]
