"""Memory of real runs in each phase, as /proc reports it, against the prediction."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from forked import become_command, forking
from sampling import product, sample
from small_run import environment, settings

TABLE_BYTES = 1_000_000_000 if os.environ.get("MESETA_SOAK") else 500_000_000
"""Bytes of the rows of all tables over all ranks."""
WIDTH = 64
CASES = product(ranks=[1, 2], background=["never", "always"])


def measure(
    folder: Path, tiny: Path, ranks: int, background: str, average: str | None = None
) -> list[dict[str, list[int]]]:
    """Return [predicted, peak] in bytes of each phase, for each rank."""
    data = folder / "data"
    shutil.copytree(tiny, data)
    described = json.loads((data / "dataset.json").read_text())
    shares = {"user": 0.5, "item": 0.3, "city": 0.2}
    for feature in described["sparse"]:
        if feature["name"] in shares:
            feature["num_embeddings"] = int(shares[feature["name"]] * TABLE_BYTES / (4 * WIDTH))
    (data / "dataset.json").write_text(json.dumps(described))
    for name, where in (("warm", tiny), ("config", data)):
        document = settings(
            where,
            folder / name,
            plan={"tables": {"*": "row_wise"}},
            model__embedding_dim=WIDTH,
            train__max_steps=6,
            train__eval_every_steps=3,
            train__average_weights=average,
            checkpoint={"every_steps": 4 if background == "always" else None, "background": background, "keep_last": 1},
        )
        (folder / f"{name}.json").write_text(json.dumps(document))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(ranks):
        variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = environment() | {name: str(value) for name, value in variables.items()}
        started.append(forking().Process(target=_run_rank, args=(folder, rank, process)))
        started[-1].start()
    for one in started:
        one.join(300)
    assert [one.exitcode for one in started] == [0] * ranks
    return [json.loads((folder / f"{rank}.out").read_text().splitlines()[-1]) for rank in range(ranks)]


def _run_rank(folder: Path, rank: int, variables: dict[str, str]) -> None:
    """Become the rank's command."""
    script = Path(__file__).with_name("memory_of_phases.py")
    with Path(os.devnull).open() as nothing, (folder / f"{rank}.out").open("wb") as output:
        become_command([str(script), str(folder)], folder, variables, [nothing.fileno(), output.fileno()], (), "python")


def check(measured: list[dict[str, list[int]]]) -> None:
    for rank, phases in enumerate(measured):
        for phase, (predicted, peak) in phases.items():
            print(f"rank {rank} {phase}: predicted {predicted / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
            assert peak <= predicted <= 1.3 * peak, (rank, phase, predicted, peak)


@pytest.mark.parametrize("case", sample(CASES, k=1, seed=2))
def test_the_memory_of_phases_matches_the_prediction(case: dict[str, object], tiny: Path, tmp_path: Path) -> None:
    check(measure(tmp_path, tiny, **case))  # type: ignore[arg-type]


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_memory_of_averages_matches_the_prediction(ranks: int, tiny: Path, tmp_path: Path) -> None:
    check(measure(tmp_path, tiny, ranks, "never", "ema"))
