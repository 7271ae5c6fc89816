"""Tests of every bad input of docs/errors.md: commands on one and on two ranks print the message of its case."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bad_input.cases import (
    DIAGNOSING,
    PLANNING,
    PREPARING,
    TRAINING,
    Place,
    change_description,
    file_that_others_need,
)
from bad_input.commands import Ended, run_here, run_on_rank, tree, within
from bad_input.messages import MESSAGES
from bad_input.output_cases import IMPORTING, PREDICTING, SCORING
from bad_input.source_cases import SOURCES
from distributed.pool import RankPool
from meseta.checkpoint import list_checkpoints
from meseta.system.locks import FolderLock
from sampling import sample
from small_run import environment, settings, train, write_config
from source_tree import ROOT

LISTS = re.findall(r"^```text no-run\n(.*?)^```", (ROOT / "docs/errors.md").read_text(), re.MULTILINE | re.DOTALL)
"""Lists of messages on the page, shortened by `...`."""
ON_RANKS = (*TRAINING, *PREDICTING)
"""Cases that can occur on several ranks."""
ALL = (*PREPARING, *SOURCES, *ON_RANKS, *SCORING, *IMPORTING, *PLANNING, *DIAGNOSING)
LEAVES_A_RUN = ("prepared_label_outside", "id_outside", "nan_in_dense", "loss_without_bound")
"""Errors of a training step. They leave a complete run up to that step."""


def says(name: str, line: str) -> bool:
    """Whether a line of standard error is the message of a case."""
    return re.fullmatch(rf"error: (rank \d: )*{pattern(MESSAGES[name.replace('_', ' ')])}", line) is not None


def pattern(message: str) -> str:
    """Regular expression for a message in which `...` matches any text."""
    return ".*".join(re.escape(part) for part in message.split("..."))


def test_every_case_has_a_message() -> None:
    names = [case.__name__.replace("_", " ") for case in ALL]
    assert sorted([*names, "run in use"]) == sorted(MESSAGES)


def test_the_page_has_every_message_and_no_other() -> None:
    lines = [line for listed in LISTS for line in listed.splitlines()]
    matches = {name: [line for line in lines if re.fullmatch(pattern(line), text)] for name, text in MESSAGES.items()}
    assert [name for name, of_message in matches.items() if len(of_message) != 1] == []
    assert {line for of_message in matches.values() for line in of_message} == set(lines)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    deltas = {"checkpoint__deltas": "consecutive", "checkpoint__keep_last": 3}
    train(settings(tiny, folder / "run", checkpoint__every_steps=4, **deltas))
    return folder / "run"


@pytest.fixture
def place(tmp_path: Path, tiny: Path, finished: Path) -> Place:
    return Place(tmp_path, tiny, finished)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Callable[..., list[Ended]]]:
    """`two_ranks("train", config)`: end of the command on each rank of a pool."""
    pool = RankPool(2)
    yield lambda *arguments: pool.run(run_on_rank, [str(argument) for argument in arguments])
    pool.close()


def check(name: str, place: Place, ended: Ended, before: dict[str, Any]) -> None:
    assert ended.code == 1 and (ended.out == "" or ended.out.startswith("columns, as inferred:\n"))
    [line] = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert says(name, line), line
    assert ended.err.splitlines()[-1] == line
    after = tree(place.folder)
    if name in LEAVES_A_RUN:
        assert not [path for path in after if "/." in path]
        after = {path: content for path, content in after.items() if not path.startswith("run")}
    assert after == before


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.__name__)
def test_one_rank(place: Place, case: Callable[[Place], list[Any]]) -> None:
    command = case(place)
    before = tree(place.folder)
    with within(120, str(command)):
        ended = run_here(*command)
    check(case.__name__, place, ended, before)


@pytest.mark.parametrize("name", sample([case.__name__ for case in ON_RANKS], 6, seed=3))
def test_two_ranks(place: Place, two_ranks: Callable[..., list[Ended]], name: str) -> None:
    """Both ranks end with one message. The launcher prints that of rank 0."""
    [case] = [case for case in ON_RANKS if case.__name__ == name]
    command = case(place)
    before = tree(place.folder)
    both = two_ranks(*command)
    assert [ended.code for ended in both] == [1, 1]
    check(case.__name__, place, both[0], before)
    [line] = both[1].err.splitlines()
    assert says(case.__name__, line), line


@pytest.mark.parametrize("name", sample([case.__name__ for case in TRAINING], 1, seed=3))
def test_as_a_command_on_two_ranks(place: Place, name: str) -> None:
    """The launcher and its ranks end within the time of a start, with one message and without a traceback."""
    [case] = [case for case in TRAINING if case.__name__ == name]
    command = [*map(str, case(place)), "--nproc", "2"]
    before = tree(place.folder)
    done = subprocess.run(
        [sys.executable, "-m", "meseta.cli.main", *command],
        capture_output=True, text=True, env=environment(), timeout=240, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    check(name, place, Ended(done.returncode, done.stdout, done.stderr), before)


def test_a_run_in_use_on_two_ranks(place: Place, two_ranks: Callable[..., list[Ended]]) -> None:
    config = write_config(place.folder / "c.yaml", settings(place.tiny, place.run(), train__epochs=2))
    lock = FolderLock(place.folder / "run")
    lock.acquire()
    before = tree(place.folder)
    both = two_ranks("train", config)
    check("run_in_use", place, both[0], before)
    assert says("run_in_use", both[1].err.splitlines()[-1])
    lock.release()
    assert [ended.code for ended in two_ranks("train", config)] == [0, 0]


@pytest.mark.parametrize("policy", ["drop", "clamp", "hash"])
def test_out_of_range_ids_are_counted_identically(
    place: Place, two_ranks: Callable[..., list[Ended]], tmp_path: Path, policy: str
) -> None:
    """On one rank and on two, the command prints the number of such ids in the files."""
    data = place.data()
    change_description(data, lambda document: document["sparse"][0].update(num_embeddings=100))
    expected = {}
    for split in ("train", "test"):
        ids = pq.read_table(data / split)["user"].to_numpy()
        expected[split] = int((ids >= 100).sum())
    assert expected["train"] > 50
    command = place.train(embedding__id_policy=policy)
    endings = [run_here(*command), two_ranks(*command, f"run_dir={tmp_path / 'two'}")[0]]
    for ended in endings:
        assert ended.code == 0, ended.err
        for what, split in (("training", "train"), ("the test split", "test")):
            said = f"out-of-range ids in {what}, handled by embedding.id_policy: user {expected[split]:,}"
            assert said in ended.out.splitlines()


def test_going_back_on_two_ranks(place: Place, two_ranks: Callable[..., list[Ended]]) -> None:
    """All ranks go back together, although only the second rank reads the damaged file."""
    plan = {"tables": {"user": {"sharding": "table_wise", "ranks": [1]}, "*": "row_wise"}}
    command = [*file_that_others_need(place), "checkpoint.resume=older", "checkpoint.keep_last=3"]
    config = settings(place.tiny, place.folder / "run", plan=plan)
    write_config(place.folder / "c.yaml", config)
    ended = two_ranks(*command)
    assert [one.code for one in ended] == [0, 0], ended
    assert "falling back to step-000000008" in ended[0].err and "resuming from step 8," in ended[0].err
    assert ended[1].err == ""
    listed = list_checkpoints(place.folder / "run")
    assert [(one.path.name[-2:], one.problem) for one in listed] == [("08", ""), ("14", "")]
    for step in (8, 14):
        os.truncate(place.folder / f"run/checkpoints/step-{step:09d}/dense.safetensors", 7)
    ended = two_ranks(*command)
    assert [one.code for one in ended] == [1, 1]
    for one in ended:
        assert len(one.errors) == 1 and one.errors[0].endswith("no older checkpoint in its folder is intact")
