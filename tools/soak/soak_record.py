"""A pytest plugin of tools/soak: notes every test that passed, and leaves out those that had passed already.

The record MESETA_SOAK_RECORD is a file of JSON lines, one per test, written as it ends; with pytest-xdist its one
writer is the process that hands out the tests.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(os.environ["MESETA_SOAK_RECORD"])


def passed() -> list[str]:
    """Names of the tests that the record holds; a line that was cut off by a kill is taken out."""
    whole = RECORD.read_bytes().rpartition(b"\n")[0] if RECORD.exists() else b""
    RECORD.write_bytes(whole + b"\n" * bool(whole))
    return [json.loads(line)["test"] for line in whole.splitlines()]


def name_of(test: str) -> str:
    """A test, and where the core's instruction set is chosen, that too."""
    return " ".join([test, *filter(None, [os.environ.get("MESETA_ISA")])])


def pytest_configure(config: pytest.Config) -> None:
    """Read once, so that all processes of pytest-xdist leave out the same tests."""
    sent = getattr(config, "workerinput", None)
    config.stash[PASSED] = passed() if sent is None else sent["passed"]


PASSED = pytest.StashKey[list[str]]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["passed"] = node.config.stash[PASSED]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = set(config.stash[PASSED])
    left_out = [item for item in items if name_of(item.nodeid) in done]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if name_of(item.nodeid) not in done]


class Recorder:
    """Writes a line per passed test."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            line = {"test": name_of(report.nodeid), "seconds": report.duration, **dict(report.user_properties)}
            with RECORD.open("a") as file:
                file.write(json.dumps(line) + "\n")


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Recorder())
