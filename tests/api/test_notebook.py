"""Jobs in a notebook: the code of the page on Python, how a run is shown, and the interrupt of the kernel."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meseta
from api.test_fit import CONFIG, processes_of
from small_run import tiny_data

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]
PAGE = Path(__file__).parents[2] / "docs" / "python.md"
CODE = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))
JOB = """
import pyarrow.parquet as pq
config = {config}
config["train"] = {{**config["train"], "epochs": 24, "eval_every_epochs": 8, "early_stopping": {{"patience": 100}}}}
config["checkpoint"] = {{"every_steps": 20}}
table = pq.read_table({data!r})
run = meseta.fit(table, "label", config=config, run_dir={run_dir!r}, nproc={nproc})
"""


@pytest.fixture
def table(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    return pq.read_table(tiny_data(tmp_path_factory.getbasetemp()).with_name("tiny.parquet"))


def interrupt_at_first_checkpoint(client: Any, run_dir: Path) -> None:
    deadline = time.monotonic() + 120
    while not list(run_dir.glob("checkpoints/step-*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    asyncio.run(client.km.interrupt_kernel())


def texts(cell: Any, kind: str = "stream") -> str:
    return "".join(output.get("text", "") for output in cell.outputs if output.output_type == kind)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_notebook_shows_a_run_and_an_interrupted_job_resumes(nproc: int, table: pa.Table, tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    run_dir, data = tmp_path / "runs/job", tmp_path / "rows.parquet"
    pq.write_table(table, data)
    job = JOB.format(config=CONFIG, data=str(data), run_dir=str(run_dir), nproc=nproc)
    sources = [CODE, "run", job, job, "run", 'meseta.fit(table, "lable", run_dir="runs/error")']
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[2].metadata["tags"] = cells[5].metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel():
        for index, cell in enumerate(cells):
            if index == 2:
                threading.Thread(target=interrupt_at_first_checkpoint, args=(client, run_dir), daemon=True).start()
            client.execute_cell(cell, index)
            if index == 2:
                assert processes_of(run_dir) == []
    nbformat.write(notebook, tmp_path / "executed.ipynb")

    [auc] = [line for line in texts(cells[0]).splitlines() if re.fullmatch(r"[01]\.\d+", line)]
    assert 0 <= float(auc) <= 1
    [shown] = [output.data for output in cells[1].outputs]
    assert "<code>runs/python</code>" in shown["text/html"] and shown["text/plain"] == "Run('runs/python')"
    assert cells[2].outputs[-1].ename == "KeyboardInterrupt"
    assert "resuming from step" in texts(cells[3]) and " samples/s" not in texts(cells[2])  # A log without bars.
    run = meseta.open_run(run_dir)
    assert f"{run.metrics['test']['auc']:.4f}" in cells[4].outputs[0].data["text/html"]
    steps = [row["step"] for row in run.history.to_pylist() if row["split"] == "train"]
    assert steps == list(range(5, steps[-1] + 1, 5)) and steps[-1] > 24 * 18
    [error] = cells[5].outputs
    assert error.ename == "MesetaError" and error.evalue.startswith("data has no column 'lable' for label=")
    assert [line for line in error.traceback if "File" in line] == [error.traceback[0]]
    assert cells[5].source in error.traceback[1]
