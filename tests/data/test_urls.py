"""Tests that URLs yield the rows of local files, and that an unreachable one is a one-line error."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from fsspec.spec import AbstractBufferedFile
from pydantic import ValidationError

from data.click_log import make_lines
from meseta.config import DataConfig
from meseta.data import Dataset, PrepareOptions
from meseta.data.prepare import prepare
from meseta.spec import MesetaError


def write_files(folder: Path, kind: str) -> None:
    """Two files of one kind."""
    for number in range(2):
        path = folder / f"log_{number}.{kind}"
        if kind == "tsv.gz":
            path.write_bytes(gzip.compress("\n".join(make_lines(60)).encode()))
        elif kind == "csv":
            path.write_text("click,price,city\n" + "".join(f'{row % 2},{row},"c{row % 7}\nx"\n' for row in range(90)))
        elif kind == "svm":
            path.write_text("".join(f"{row % 2} {row % 9}:1 {row % 5 + 20}:0.5\n" for row in range(90)))
        else:
            table = pa.table(
                {"label": [row % 2 for row in range(90)], "bag": [[f"b{row % 4}", "c"] for row in range(90)]}
            )
            pq.write_table(table, path, row_group_size=40)


def contents(dataset: Dataset) -> tuple[Any, ...]:
    files = {
        file.path: (dataset.dir / file.path).read_bytes() for split in dataset.splits.values() for file in split.files
    }
    return files, dataset.dense, dataset.sparse, dataset.splits


class BufferedFile(AbstractBufferedFile):
    """File with the methods of those of S3, Google Cloud Storage and others."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start, end)


class BufferedFileSystem(MemoryFileSystem):
    protocol = "buffered"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            return BufferedFile(self, path, mode, size=self.info(path)["size"])
        return super()._open(path, mode, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return bytes(self.store[path].getbuffer()[start:end])


fsspec.register_implementation("buffered", BufferedFileSystem)


@pytest.mark.parametrize("kind", ["tsv.gz", "csv", "svm", "parquet"])
@pytest.mark.parametrize("scheme", ["memory", "file", "buffered"])
def test_a_url_is_read_as_a_local_file_is(tmp_path: Path, scheme: str, kind: str) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    write_files(raw, kind)
    root = f"file://{raw}"
    if scheme != "file":
        root = f"{scheme}://{tmp_path.name}-{kind}"
        fsspec.filesystem(scheme).put(f"{raw}/", root, recursive=True)
    local = prepare(PrepareOptions(sources=[f"{raw}/*.{kind}"], out=tmp_path / "local"))
    remote = prepare(PrepareOptions(sources=[f"{root}/log_*.{kind}"], out=tmp_path / "remote"))
    assert contents(remote) == contents(local)
    assert [s.path.rpartition("/")[2] for s in remote.sources] == [f"log_0.{kind}", f"log_1.{kind}"]
    assert all(s.path.startswith(f"{scheme}://") for s in remote.sources)


@pytest.fixture
def memory(tmp_path: Path) -> str:
    """A folder of memory:// with one good file."""
    root = f"memory:///{tmp_path.name}"
    fsspec.filesystem("memory").pipe(f"{root}/a.csv", b"click,city\n0,x\n1,y\n")
    return root


def refused(tmp_path: Path, *sources: str) -> str:
    with pytest.raises(MesetaError) as caught:
        prepare(PrepareOptions(sources=sources, out=tmp_path / "out"))
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
    return str(caught.value)


def test_what_cannot_be_read_is_named(tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system = fsspec.filesystem("memory")
    system.pipe(f"{memory}/empty.csv", b"")
    system.pipe(f"{memory}/cut.csv.gz", gzip.compress(b"click,city\n" + b"0,x\n" * 1000)[:-20])
    system.pipe(f"{memory}/cut.parquet", b"PAR1" + bytes(100))
    assert f"source '{memory}/b.csv': no such file" in refused(tmp_path, f"{memory}/b.csv")
    assert "no file matches" in refused(tmp_path, f"{memory}/*.tsv")
    assert "cut.csv.gz' is truncated" in refused(tmp_path, memory)  # all files of the folder are read
    assert "empty.csv' is empty" in refused(tmp_path, f"{memory}/empty.csv")
    assert "listed twice" in refused(tmp_path, f"{memory}/a.csv", f"{memory}/a*.csv")
    assert "truncated or damaged" in refused(tmp_path, f"{memory}/cut.csv.gz")
    assert "cut.parquet' cannot be read" in refused(tmp_path, f"{memory}/cut.parquet")
    assert "Protocol not known: nosuch" in refused(tmp_path, "nosuch://x/y.csv")

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("the endpoint answers 503\nand more")

    monkeypatch.setattr(type(system), "_open", fail)
    message = refused(tmp_path, f"{memory}/a.csv")
    assert "a.csv' cannot be read (the endpoint answers 503); check the URL, the network and the credentials" in message


@pytest.mark.parametrize(
    ("url", "module", "package"),
    [
        ("s3://bucket/*.csv", "s3fs", "meseta[s3]"),
        ("gs://bucket/a.csv", "gcsfs", "meseta[gcs]"),
        ("https://host/a.csv", "aiohttp", "fsspec[http]"),
        ("sftp://host/a.csv", "paramiko", "fsspec[sftp]"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)  # of other tests
    for name in [name for name in sys.modules if name.startswith("fsspec.implementations.") or name == module]:
        if "memory" not in name and "local" not in name:
            monkeypatch.delitem(sys.modules, name) if sys.modules[name] is not None else None
    assert refused(tmp_path, url).endswith(f"pip install '{package}'")


def test_datasets_are_local(tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match="--out must be a folder on this machine, got 's3:/bucket/data'"):
        PrepareOptions(sources=["a.csv"], out=Path("s3://bucket/data"))
    with pytest.raises(ValidationError, match="must be a folder on this machine"):
        DataConfig.model_validate({"dir": "gs://bucket/data"})
    assert DataConfig.model_validate({"dir": "data/a"}).dir == Path("data/a")
