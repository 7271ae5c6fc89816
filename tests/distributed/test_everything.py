"""examples/configs/everything.yaml on two hosts of two ranks, killed at random moments.

The run ends with the bits of an undisturbed run. Without codecs and stale lookups it has the bits of a run with all
tables in memory and none of the other features.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.hosts_command import HostsCommand
from cli.processes import Command
from cli.test_kill import kill_run, killed, saving
from hosts import Hosts, why_impossible
from meseta import checkpoint
from meseta.ops.row_file.scratch_file import SUFFIX
from small_run import criteo_shaped_data, final_checksum, metrics, train, without_times, write_config
from source_tree import ROOT

from .pool import RankPool

CONFIG = ROOT / "examples/configs/everything.yaml"
NUM_STEPS = 18
SMALL = {
    "model": {"embedding_dim": 128, "bottom_mlp": [16], "top_mlp": [16]},
    "embedding": {"optimizer": {"name": "adam", "lr": 0.01}},
    "train": {"batch_size": 40, "log_every_steps": 2, "eval_every_steps": 8, "eval_batch_size": 500},
    "checkpoint": {"every_steps": 3},
}
"""Sizes with which a run takes seconds, and rows of 1.5 KB fill segments of their files."""
CACHE_ROWS = {"cat_2": 32, "cat_11": 55, "cat_20": 105, "cat_3": 32, "cat_15": 105}
"""Cache rows of each shard, few enough that rows are evicted."""
EXACT = {"comm": {"forward": "fp32", "dense": "fp32"}}
MOMENTS = ["start-up", "training", "saving", "evaluating", "one rank", "signal"]


def everything(data: Path, folder: Path, *changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the config with other sizes and paths, and `changes` of its sections."""
    document = yaml.safe_load(CONFIG.read_text())
    places = {"data": {"dir": str(data), "shuffle_window_rows": 500}, "storage": {"dir": str(folder / "rows")}}
    for change in (SMALL, {"train": {"max_steps": NUM_STEPS}}, places, *changes):
        for section, keys in change.items():
            document[section] |= keys
    tables = document["plan"]["tables"]
    for name, cache_rows in CACHE_ROWS.items():
        tables[name] |= {"cache_rows": cache_rows}
    return document | {"run_dir": str(folder / "run"), "num_threads": 1}


def plain(data: Path, folder: Path) -> dict[str, Any]:
    """Return the config of the same model in memory, without the other features of the example."""
    document = everything(data, folder)
    for section in ("storage", "comm", "checkpoint"):
        del document[section]
    return document | {
        "plan": {"devices_per_host": 2, "tables": {"*": "table_wise"}, "exchange": "flat"},
        "pipeline": {"overlap": "off"},
    }


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return criteo_shaped_data(tmp_path_factory.getbasetemp() / "data")


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    if (why := why_impossible()) is not None:
        pytest.skip(f"no network namespaces: {why}")
    with Hosts(2, ranks=2, across="1gbit") as made:
        yield made


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, ranks: Callable[[int], RankPool], data: Path
) -> Callable[[str], Path]:
    """Return a function that returns the directory of an undisturbed run. '0' and '1' are `pipeline.staleness`; 'exact'
    has no codec."""
    runs: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in runs:
            folder = tmp_path_factory.mktemp(name)
            changes = (
                [EXACT] if name == "exact" else [{"pipeline": {"staleness": int(name)}}] if name != "plain" else []
            )
            document = plain(data, folder) if name == "plain" else everything(data, folder, *changes)
            ranks(4).run(train, document)
            runs[name] = folder / "run"
        return runs[name]

    return get


def check_equal(run_dir: Path, expected: Path) -> None:
    assert final_checksum(run_dir) == final_checksum(expected)
    assert without_times(metrics(run_dir)) == without_times(metrics(expected))


@pytest.mark.soak
def test_features_change_no_bit_of_a_plain_run(undisturbed: Callable[[str], Path]) -> None:
    """Rows were read from disk, and checkpoints are deltas."""
    check_equal(undisturbed("exact"), undisturbed("plain"))
    run_dir = undisturbed("exact")
    traffic = [line["row_traffic"] for line in metrics(run_dir) if line["kind"] == "train"]
    for name in CACHE_ROWS:
        assert sum(of_tables[name]["num_misses"] for of_tables in traffic[2:]) > 0, name
    assert sum(of_tables["cat_20"]["read_bytes"] for of_tables in traffic) > 0
    assert [*run_dir.glob("checkpoints/*/tables/*/rows-*")] and [*run_dir.glob("checkpoints/*/pruned.json")]


def reach(command: Command, run_dir: Path, moment: str, draw: random.Random, share: float) -> None:
    """Wait for the moment to kill. It differs from tests/cli/test_kill.py because a run has fewer steps."""
    saved = checkpoint.latest_complete(run_dir / "checkpoints") if run_dir.exists() else None
    step = int(saved.name.removeprefix("step-")) if saved else 0
    aim = step + 2 * draw.randint(1, 4) + step % 2
    if moment == "evaluating":
        aim = -(-aim // 8) * 8
    if moment == "start-up" or aim > NUM_STEPS - 2:
        time.sleep(draw.uniform(0.05, 0.05 + 1.5 * share))
    elif command.reached(lambda: f"step {aim}/" in command.err.read_text(), f"step {aim}"):
        if moment == "saving":
            command.reached(lambda: saving(run_dir), "a checkpoint")
        longest_s = {"saving": 0.02, "evaluating": 0.15}.get(moment, 0.05)
        time.sleep(draw.uniform(0, longest_s * share))


def kill_one(command: HostsCommand) -> bool:
    """Kill the last rank and check that the others report it and end. Return `False` if it had ended before."""
    command.send(signal.SIGKILL, to_all=False)
    command.wait(60)
    codes = [process.exitcode for process in command.processes]
    if codes[-1] == 0:
        return False
    assert codes[-1] == -signal.SIGKILL and 0 not in codes[:-1], (codes, command.words())
    for file in sorted(command.folder.glob("[0-2].err")):
        assert "error: " in file.read_text() and "Traceback" not in file.read_text(), command.words()
    return True


def signal_all(command: HostsCommand) -> bool:
    """Send SIGTERM to all ranks and check that they save and end together, or had not started to train. Return `False`
    if all had ended before."""
    command.send(signal.SIGTERM)
    command.wait(60)
    codes = {process.exitcode for process in command.processes}
    assert codes in ({0}, {128 + signal.SIGTERM}) or -signal.SIGTERM in codes, (codes, command.words())
    return codes != {0}


KILLS = {"one rank": kill_one, "signal": signal_all}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("name", ["0", "1", "plain"])
def test_killed_on_two_hosts(
    undisturbed: Callable[[str], Path], hosts: Hosts, data: Path, tmp_path: Path, name: str, seed: int
) -> None:
    """A soak kills 60 times."""
    draw = random.Random(f"everything/{name}/{seed}")
    changes = EXACT if name == "plain" else {"pipeline": {"staleness": int(name)}}
    config = write_config(tmp_path / "c.yaml", everything(data, tmp_path, changes))
    start = partial(HostsCommand, hosts)
    for number in range(2):
        moment = draw.choice(MOMENTS)
        kill: Any = KILLS.get(moment, killed)
        kill_run(tmp_path / str(number), (config,), moment, draw, start=start, reach=reach, kill=kill)
    start(tmp_path / "last", "train", config).succeed()
    check_equal(tmp_path / "run", undisturbed(name))
    assert not [path for path in (tmp_path / "run").rglob("*") if path.name.startswith(".") or ".tmp" in path.name]
    assert not [*(tmp_path / "rows").glob(f"*{SUFFIX}")]
