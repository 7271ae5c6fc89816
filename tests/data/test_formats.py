"""A raw format is one module: a toy, `name=value` in each line, is prepared, explained, killed and resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from meseta.data import Dataset, PrepareOptions
from meseta.data.formats import registry
from meseta.data.formats import text as text_format
from meseta.data.formats.format import Block, ColumnRequest, FileHead, Source, TextDialect
from meseta.data.formats.text import TextFormat, infer_text_layout, raw_text, read_first_line
from meseta.data.prepare import prepare, staging, write
from meseta.data.schema.layout import RawLayout, RawRows
from meseta.spec import MesetaError


class KeyValue(TextFormat):
    """Lines of `name=value` between spaces, all names in the same order."""

    name = "keyvalue"
    title = "text of names and values"

    def detect(self, head: FileHead) -> TextDialect | None:
        line = head.text.partition(b"\n")[0]
        return TextDialect() if line and all(b"=" in field for field in line.split(b" ")) else None

    def columns(self, source: Source) -> tuple[str, ...]:
        return tuple(field.partition("=")[0] for field in read_first_line(source).decode().split(" "))

    def layout(self, sources: Sequence[Source], asked: ColumnRequest) -> RawLayout:
        names = self.columns(sources[0])
        lines = Path(sources[0].path).read_text().splitlines()
        rows = [[field.partition("=")[2] for field in line.split(" ")] for line in lines]
        sample = {name: [row[place] for row in rows if len(row) == len(names)] for place, name in enumerate(names)}
        return infer_text_layout(f"source {sources[0].path!r}", sample, asked.named_columns, has_names=True)

    def parse(self, block: Block, layout: RawLayout) -> RawRows:
        names: tuple[str, ...] = ()
        lines = []
        for number, line in enumerate(raw_text(block).decode().splitlines(), start=block.first_line + 1):
            fields = [field.partition("=") for field in line.split(" ")]
            if not all(sign for _, sign, _ in fields):
                reason = f"source {block.source.path!r}, line {number}: a field has no name"
                raise MesetaError(reason, remedy="fix or remove it")
            names = tuple(name for name, _, _ in fields)
            lines.append(",".join(value for _, _, value in fields) + "\n")
        as_csv = registry.find_format("csv")
        return as_csv.parse(replace(block, raw="".join(lines).encode(), header=names), layout)

    def key_schema(self, where: str, source: Source, names: Sequence[str]) -> pa.Schema:
        raise MesetaError(f"{where} has no keys")

    def key_columns(self, block: Block, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        raise MesetaError("no keys")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FORMATS", (KeyValue(), *registry.FORMATS))


NAMES = ("click", "price", "city")
ROWS = [(i % 3 % 2, f"{i * 7 % 50}.5", f"city{i * i % 11}") for i in range(600)]


def write_toy(path: Path) -> str:
    path.write_text("".join(" ".join(f"{n}={v}" for n, v in zip(NAMES, row, strict=True)) + "\n" for row in ROWS))
    return str(path)


def write_csv(path: Path) -> str:
    path.write_text(",".join(NAMES) + "\n" + "".join(",".join(map(str, row)) + "\n" for row in ROWS))
    return str(path)


def parts(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.parquet"))}


def test_it_gives_the_bytes_of_the_same_rows_as_csv(tmp_path: Path) -> None:
    dataset = prepare(PrepareOptions(sources=[write_toy(tmp_path / "log.kv")], out=tmp_path / "toy"))
    prepare(PrepareOptions(sources=[write_csv(tmp_path / "log.csv")], out=tmp_path / "csv"))
    assert parts(tmp_path / "toy") == parts(tmp_path / "csv") != {}
    assert dataset.source_form is not None and dataset.source_form.kind == "keyvalue"
    assert Dataset.load(tmp_path / "toy") == dataset


def test_a_damaged_line_is_explained_or_skipped(tmp_path: Path) -> None:
    path = Path(write_toy(tmp_path / "log.kv"))
    lines = path.read_text().splitlines(keepends=True)
    lines[41] = "click=1 oops city=c\n"
    path.write_text("".join(lines))
    options = PrepareOptions(sources=[str(path)], out=tmp_path / "out")
    with pytest.raises(MesetaError, match=r"log.kv', line 42: a field has no name; fix"):
        prepare(options)
    dataset = prepare(replace(options, bad_rows="skip"))
    assert dataset.bad_rows is not None
    assert dataset.bad_rows.num_rows == 1 and dataset.bad_rows.first[0].endswith("line 42: a field has no name")


def test_killed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(write, "WINDOW_SAMPLES", 64)
    monkeypatch.setattr(staging, "COMMIT_INTERVAL_S", 0.0)
    source = write_toy(tmp_path / "log.kv")
    prepare(PrepareOptions(sources=[source], out=tmp_path / "whole"))
    options = PrepareOptions(sources=[source], out=tmp_path / "out")
    calls = 0

    def interrupt(stage: str, rows: int, share: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(options, interrupt)
    assert not (tmp_path / "out").exists()
    first_rows: dict[str, int] = {}
    prepare(options, lambda stage, rows, share: first_rows.setdefault(stage, rows) and None)
    assert first_rows["read"] > 0, "it did not resume at its position"
    assert parts(tmp_path / "out") == parts(tmp_path / "whole")


def test_a_log_of_two_formats_is_refused(tmp_path: Path) -> None:
    sources = [write_toy(tmp_path / "log.kv"), write_csv(tmp_path / "log.csv")]
    with pytest.raises(MesetaError, match=r"is text of names and values and .* is CSV; prepare one format at a time"):
        prepare(PrepareOptions(sources=sources, out=tmp_path / "out"))
