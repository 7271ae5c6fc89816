"""Tests of spoiled source files: a named error, or the rows of an independent reader. Decompression bombs have bounded
memory."""

from __future__ import annotations

import bz2
import csv
import ctypes
import ctypes.util
import gzip
import io
import json
import lzma
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bad_input.commands import within
from bad_input.spoil import PIECES, spoil_bytes
from meseta.data.formats.format import Source, read_blocks
from meseta.data.formats.text import raw_text
from meseta.data.prepare import PrepareOptions, read_layout
from meseta.data.prepare.sources import find_sources
from meseta.spec import MesetaError
from sampling import sample

CASES_PER_TEST = 50
NUM_TESTS = 200
"""Tests of each kind, which is 10,000 files."""
HEADER = ["label", "price", "user_id", "city"]
ROWS = [[str(row % 2), f"{row}.5", str(row % 7), f"c {row % 3}"] for row in range(40)]
CSV = "".join(",".join(row) + "\n" for row in [HEADER, *ROWS]).encode()
JSON_LINES = "".join(
    json.dumps({"label": int(a), "price": float(b), "user_id": int(c), "city": d, "tags": [d], "o": {"x": [None]}})
    + "\n"
    for a, b, c, d in ROWS
).encode()
SPLIT = "".join("::".join(row) + "\n" for row in [HEADER, *ROWS]).encode()
TYPED = "label:float\tprice:float\tuser_id:token\tcity:token_seq\n" + "".join("\t".join(row) + "\n" for row in ROWS)


def zipped(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("log.csv", data)
    return file.getvalue()


def unzipped(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        [name] = [name for name in archive.namelist() if not name.endswith("/")]
        return archive.read(name)


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def unzstd(data: bytes) -> bytes:
    """Decompress with the system's library, which is independent of Arrow."""
    name = ctypes.util.find_library("zstd")
    if name is None:
        pytest.skip("no libzstd on this machine to compare with")
    library = ctypes.CDLL(name)
    library.ZSTD_decompress.restype = ctypes.c_size_t
    buffer = ctypes.create_string_buffer(1 << 20)
    size = library.ZSTD_decompress(buffer, ctypes.c_size_t(len(buffer)), data, ctypes.c_size_t(len(data)))
    if library.ZSTD_isError(ctypes.c_size_t(size)):
        raise ValueError("damaged")
    return buffer.raw[:size]


COMPRESSED: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "log.csv.bz2": (bz2.compress, bz2.decompress),
    "log.csv.xz": (lzma.compress, lzma.decompress),
    "log.csv.zst": (zstd, unzstd),
    "log.csv.zip": (zipped, unzipped),
}


def texts_of_json(data: bytes) -> Iterator[list[str]]:
    for line in data.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n").split(b"\n"):
        row = json.loads(line.decode(), parse_int=str, parse_float=str, parse_constant=str)
        yield [field(row.get(name)) for name in HEADER]


def field(value: Any) -> str:
    if isinstance(value, dict | list):
        return json.dumps(value, separators=(",", ":"))
    return {None: "", True: "true", False: "false"}.get(value, value)


def fields_of_split(data: bytes) -> Iterator[list[str]]:
    header, *lines = data.decode(errors="replace").rstrip("\r\n").split("\n")
    names = [name.strip() for name in header.removeprefix("\ufeff").split("::")]
    for line in lines:
        row = dict(zip(names, line.removesuffix("\r").split("::"), strict=False))
        yield [row[name] for name in HEADER]


def fields_of_typed(data: bytes) -> Iterator[list[str]]:
    header, *rows = csv.reader(io.StringIO(data.decode("utf-8-sig", errors="replace").rstrip("\r\n")), delimiter="\t")
    names = [name.rpartition(":")[0].strip() for name in header]
    for row in rows:
        record = dict(zip(names, row, strict=False))
        yield [record[name] for name in HEADER]


TEXT: dict[str, tuple[bytes, Callable[[bytes], Iterator[list[str]]]]] = {
    "log.jsonl": (JSON_LINES, texts_of_json),
    "log.dat": (SPLIT, fields_of_split),
    "log.inter": (TYPED.encode(), fields_of_typed),
}
KINDS = [*COMPRESSED, *TEXT]
MORE = [
    *PIECES,
    *[b",", b"\t", b"\r", b"::", b"\\u", b"1e400", b"null", b"[[[[", b"}\n{", b'"a":', b"\xef\xbb\xbf"] * 2,
]


def read(path: Path) -> tuple[Source, list[bytes], list[list[str]]]:
    """Return the text and the fields of all rows after every check that preparing makes."""
    options = PrepareOptions(sources=[str(path)], out=path.parent / "out", label="label")
    [source] = find_sources([str(path)], {}, split_rest=False)
    layout = read_layout(options)
    [source] = source.format.with_header([source])
    schema = source.format.key_schema(f"source {path}", source, HEADER)
    texts, fields = [], []
    for block in read_blocks(source, layout.columns):
        source.format.parse(block, layout)
        texts.append(raw_text(block))
        columns = source.format.key_columns(block, HEADER, schema)
        fields += [list(row.values()) for row in columns.to_pylist()]
    return source, texts, fields


@pytest.mark.parametrize("kind", KINDS)
def test_good_files_are_read(tmp_path: Path, kind: str) -> None:
    content = COMPRESSED[kind][0](CSV) if kind in COMPRESSED else TEXT[kind][0]
    (tmp_path / kind).write_bytes(content)
    _, _, fields = read(tmp_path / kind)
    expected = list(TEXT[kind][1](content)) if kind in TEXT else ROWS
    assert [row[:1] + row[2:] for row in fields] == [row[:1] + row[2:] for row in ROWS] and fields == expected


@pytest.mark.parametrize("case", sample([f"{kind} {seed}" for kind in KINDS for seed in range(NUM_TESTS)], 7, seed=5))
def test_spoiled_files(tmp_path: Path, case: str) -> None:
    kind, _, seed = case.partition(" ")
    check(tmp_path, kind, int(seed), CASES_PER_TEST)


def check(folder: Path, kind: str, seed: int, num_cases: int) -> None:
    draw = random.Random(f"{kind}:{seed}")
    path = folder / kind
    for number in range(num_cases):
        if kind in COMPRESSED:
            compress, decompress = COMPRESSED[kind]
            data = spoil_bytes(compress(CSV), draw)
        else:
            good, rows_of = TEXT[kind]
            data = spoil_bytes(good, draw, MORE)
        path.write_bytes(data)
        with within(60, f"{kind} {seed} {number}"):
            try:
                source, texts, fields = read(path)
            except MesetaError as error:
                message = str(error)
                assert "\n" not in message and kind in message, message
                continue
        where = (kind, seed, number)
        if kind in COMPRESSED:
            expected = decompress(data).rstrip(b"\r\n")
            assert source.format.name == "csv" and expected.endswith(b"".join(texts).rstrip(b"\r\n")), where
            assert expected.count(b"\n") == len(b"".join(texts).splitlines()), where
        else:
            assert fields == list(rows_of(data)), where


BOMB_BYTES = 512 << 20
NUM_GOOD_PAIRS = 2_000_000 if os.environ.get("MESETA_SOAK") else 100_000
"""Pairs of rows of the good file."""


def repeated(piece: bytes, compress: Callable[[], Any]) -> bytes:
    """Return a compressed stream of equal pieces."""
    one = compress()
    chunk = piece * ((1 << 20) // len(piece))
    parts = [one.compress(chunk) for _ in range(BOMB_BYTES // len(chunk))]
    return b"".join([*parts, one.flush()])


def many_values(row: bytes) -> bytes:
    return (b'{"label": 0, "a": [' + row * ((30 << 20) // len(row)) + b"0]}\n") * 2


def bombs() -> dict[str, Callable[[], bytes]]:
    good = b"label,a\n" + b"1,2\n0,1\n" * 100
    return {
        "zeros.csv.bz2": lambda: bz2.compress(good) + repeated(bytes(1000), bz2.BZ2Compressor),
        "zeros.csv.xz": lambda: lzma.compress(good) + repeated(bytes(1000), lzma.LZMACompressor),
        "zeros.csv.zst": lambda: zstd(good) + zstd(bytes(BOMB_BYTES)),
        "zeros.csv.zip": lambda: zipped(good + bytes(BOMB_BYTES)),
        "zeros.csv.gz": lambda: gzip.compress(good) + gzip.compress(bytes(BOMB_BYTES), 1),
        "lists.jsonl": lambda: many_values(b"[],"),
        "lists_in_lists.jsonl": lambda: many_values(b"[[[[[[]]]]]],"),
        "objects.jsonl.gz": lambda: gzip.compress(many_values(b'{"a":{}},'), 1),
        "keys.jsonl": lambda: b"".join(b'{"label": 0, "%d": 1}\n' % row for row in range(500_000)),
        "rows_of_many_keys.jsonl": lambda: b"".join(
            b'{"label":%d,"a%d":1,"b%d":2}\n' % (row % 2, row % 97, row % 89) for row in range(500_000)
        ),
        "short_rows.jsonl": lambda: b'{"label":0,"a":[1,1,1,1,1,1,1,1]}\n' * 500_000,
        "long_lines.dat": lambda: b"label::a\n1::2\n" * 10 + b"1::" * 20_000_000,
    }


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(bombs()))
def test_memory_is_bounded(tmp_path: Path, name: str) -> None:
    """The peak memory of files that expand to much more than their size is close to that of a good file."""
    (tmp_path / "good.csv").write_bytes(b"label,a\n" + b"1,2\n0,1\n" * NUM_GOOD_PAIRS)
    (tmp_path / name).write_bytes(bombs()[name]())
    script = (
        "import resource, sys; from pathlib import Path; from meseta.data.prepare import PrepareOptions, prepare\n"
        "from meseta.errors import MesetaError\n"
        "try: prepare(PrepareOptions(sources=[sys.argv[1]], out=Path(sys.argv[2]), num_threads=2))\n"
        "except MesetaError as error: print(error, file=sys.stderr)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = {}
    for file in ("good.csv", name):
        # A process inherits the peak of its parent, so a shell starts it.
        arguments = [script, str(tmp_path / file), str(tmp_path / f"{file}.out")]
        command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        assert "Traceback" not in done.stderr and (file == "good.csv" or name in done.stderr or "rows" in name)
        peaks[file] = int(done.stdout) / 1024
    assert peaks[name] <= peaks["good.csv"] + 300, (peaks, done.stderr)
