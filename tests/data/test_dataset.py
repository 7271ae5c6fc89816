"""dataset.json: read back as written, and refused with the key, the rule and the value."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.click_log import make_lines, write_tsv
from meseta.data import Dataset
from meseta.data.prepare import PrepareOptions, prepare
from meseta.spec import MesetaError


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    source = write_tsv(folder / "log.tsv", make_lines(30))
    prepare(PrepareOptions(sources=[str(source)], out=folder / "out"))
    return json.loads((folder / "out" / "dataset.json").read_text())


def test_read_back(document: dict[str, Any]) -> None:
    assert Dataset.from_dict(document).to_dict() == document
    assert document["format"] == "meseta.dataset/1"
    assert document["sparse"][0]["statistics"]["reuse"]["edges"] == [0, *(2**i for i in range(16))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "meseta.dataset/9"}, "format must be 'meseta.dataset/1', got 'meseta.dataset/9'"),
        ({"dense": [{"name": "a"}]}, r"dense.0.fill: Field required"),
        ({"dense": [{"name": "label", "fill": 0.0, "mean": 0.0, "std": 1.0}]}, "column 'label' is named twice"),
        ({"splits": {"train": {"num_rows": 3, "num_positives": 0, "files": []}}}, "hold 0 rows, but num_rows is 3"),
        ({"surprise": 1}, "surprise: Extra inputs"),
    ],
)
def test_bad_documents_are_refused(document: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(MesetaError, match=message):
        Dataset.from_dict({**document, **change}, "somewhere")


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match="make it with `meseta prepare"):
        Dataset.load(tmp_path)
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(MesetaError, match="is not JSON"):
        Dataset.load(tmp_path)


def test_preparing_needs_no_torch() -> None:
    code = "import sys, meseta.data.prepare, meseta.cli.prepare; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
