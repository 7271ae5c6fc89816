"""Self-contained HTML pages about a run, a comparison of runs, a plan, a dataset or a suite of trainings."""

from meseta.report.page import write_report

__all__ = ["write_report"]
