"""Compressed files, JSON lines, long delimiters and typed headers are read as the same rows in plain CSV are."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.data import Dataset, PrepareOptions
from meseta.data.formats import encodings, json_lines
from meseta.data.formats import text as text_format
from meseta.data.formats.csv import UNIT_SEPARATOR, convert_to_csv
from meseta.data.prepare import prepare, read_layout, staging, write
from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like
from meseta.data.read.options import ReaderOptions
from meseta.data.read.reader import Reader
from meseta.spec import MesetaError
from sampling import product, sample

HEADER = ("click", "price", "user_id", "city", "time")
CITIES = ("Köln", "two words", "a,b", 'the "old" one', "semi;colon", "", "{x}", "東京")


def make_rows(num_rows: int = 300) -> list[tuple[str, ...]]:
    draw = random.Random(7)
    return [
        (
            str(int(draw.random() < 0.3)),
            draw.choice(["", "0.5", "-2.25", "1e3", "9.90"]),
            str(10**12 + draw.randrange(40)),
            draw.choice(CITIES),
            f"2026-01-{1 + row % 28:02d} 10:00:00",
        )
        for row in range(num_rows)
    ]


def csv_bytes(rows: list[tuple[str, ...]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([HEADER, *rows])
    return text.getvalue().encode()


def json_bytes(rows: list[tuple[str, ...]]) -> bytes:
    """Numbers are numbers, and an empty field is null, or a key that is not there."""
    lines = []
    for number, (click, price, user, city, time) in enumerate(rows):
        pairs = {"click": int(click), "user_id": int(user), "city": city or None, "time": time}
        line = json.dumps(pairs, ensure_ascii=bool(number % 2))
        if price:
            line = f'{{"price": {price}, {line[1:]}'
        elif number % 3:
            line = f'{{"price": null, {line[1:]}'
        lines.append(line + "\n")
    return "".join(lines).encode()


def zipped(data: bytes, name: str = "log.csv", method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr(name, data)
    return file.getvalue()


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def in_members(compress: Callable[[bytes], bytes], between: bytes = b"") -> Callable[[bytes], bytes]:
    """Compresses two parts, as `cat` of two files does."""
    return lambda data: compress(data[:1000]) + between + compress(data[1000:])


COMPRESSIONS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": (".gz", gzip.compress),
    "gzip members": (".gz", in_members(gzip.compress)),
    "bz2": (".bz2", bz2.compress),
    "bz2 members": (".bz2", in_members(bz2.compress)),
    "xz": (".xz", lzma.compress),
    "xz members": (".xz", in_members(lzma.compress, bytes(8))),
    "zstd": (".zst", zstd),
    "zstd frames": (".zst", in_members(zstd)),
    "zstd after a skippable frame": (".zst", lambda data: b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc" + zstd(data)),
    "zip": (".zip", zipped),
    "zip, stored": (".zip", lambda data: zipped(data, method=zipfile.ZIP_STORED)),
    "another name": (".anything", bz2.compress),
}


def parts(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.parquet"))}


def run(tmp_path: Path, name: str, data: bytes, **options: Any) -> Dataset:
    """Prepare one file; the folder is called after it."""
    path = tmp_path / name
    path.write_bytes(data)
    chosen = {"hash_rows": 500, "bad_rows": "error", **options}
    return prepare(PrepareOptions(sources=[str(path)], out=tmp_path / f"{name}.out", **chosen))


def refused(tmp_path: Path, name: str, data: bytes, **options: Any) -> str:
    with pytest.raises(MesetaError) as caught:
        run(tmp_path, name, data, **options)
    message = str(caught.value)
    assert "\n" not in message and name in message and not (tmp_path / f"{name}.out").exists()
    return message


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", 1500)


@pytest.fixture(scope="module")
def plain_parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_format, "BLOCK_BYTES", 1500)
        run(folder, "plain.csv", csv_bytes(make_rows()))
    return parts(folder / "plain.csv.out")


@pytest.mark.parametrize("kind", sample(COMPRESSIONS, 8, seed=0))
@pytest.mark.usefixtures("small_blocks")
def test_compressed_files_give_the_rows_of_plain_ones(tmp_path: Path, plain_parts: dict[str, bytes], kind: str) -> None:
    ending, compress = COMPRESSIONS[kind]
    run(tmp_path, f"log.csv{ending}", compress(csv_bytes(make_rows())))
    assert parts(tmp_path / f"log.csv{ending}.out") == plain_parts != {}


@pytest.mark.usefixtures("small_blocks")
def test_the_file_in_a_zip_archive_determines_the_format(tmp_path: Path) -> None:
    """Its name is used for nothing else, and macOS's metadata are no file."""
    data = csv_bytes(make_rows()).replace(b",", b"|")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("folder/", b"")
        archive.writestr("../../escaped/LOG.CSV", data)
        archive.writestr("__MACOSX/._LOG.CSV", b"metadata")
    run(tmp_path, "plain.csv", data)
    run(tmp_path, "export.zip", file.getvalue())
    assert parts(tmp_path / "export.zip.out") == parts(tmp_path / "plain.csv.out") != {}
    assert {path.name for path in tmp_path.iterdir()} == {
        "plain.csv", "plain.csv.out", "export.zip", "export.zip.out",
    }  # fmt: skip


def test_a_truncated_or_damaged_file_is_named(tmp_path: Path) -> None:
    data = csv_bytes(make_rows())
    for number, (ending, compress) in enumerate(COMPRESSIONS.values()):
        whole = compress(data)
        message = refused(tmp_path, f"cut{number}.csv{ending}", whole[:-9])
        assert "is truncated or damaged" in message or "cannot be read" in message
        if ending != ".zip":
            message = refused(tmp_path, f"more{number}.csv{ending}", whole + b"click,price\n")
            assert "is truncated or damaged" in message or "cannot be read" in message


def test_archives_of_no_single_plain_file_are_named(tmp_path: Path) -> None:
    several = io.BytesIO()
    with zipfile.ZipFile(several, "w") as archive:
        for name in ("a.csv", "b.csv", "c.csv", "d.csv"):
            archive.writestr(name, b"click,x\n1,2\n")
    message = refused(tmp_path, "several.zip", several.getvalue())
    assert (
        "is a zip archive with 4 files ('a.csv', 'b.csv', 'c.csv', ...), but must contain exactly one; unpack it"
        in message
    )
    assert "is a zip archive with no file" in refused(tmp_path, "none.zip", zipped(b"", "folder/"))
    for method, number in ((zipfile.ZIP_LZMA, 14), (zipfile.ZIP_BZIP2, 12)):
        message = refused(tmp_path, f"method{number}.zip", zipped(b"click,x\n1,2\n", method=method))
        assert f"'log.csv' in this zip archive has compression method {number}" in message
    locked = bytearray(zipped(b"click,x\n1,2\n"))
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[locked.index(magic) + offset] |= 1
    assert "'log.csv' in this zip archive is encrypted; decrypt it" in refused(tmp_path, "locked.zip", bytes(locked))
    many = io.BytesIO()
    with zipfile.ZipFile(many, "w") as archive:
        for number in range(65):
            archive.writestr(zipfile.ZipInfo(f"{number:0>65000}"), b"")
    assert "is a zip archive with too many files" in refused(tmp_path, "many.zip", many.getvalue())


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["zstd", "zip", "zip, stored"])
def test_large_files_are_read_whole(tmp_path: Path, kind: str) -> None:
    """Incompressible rows, which take more than one stored block."""
    data = b"label,a\n1," + random.Random(0).randbytes(5 << 20).hex().encode() + b"\n0,x\n"
    path = tmp_path / "log"
    path.write_bytes(COMPRESSIONS[kind][1](data))
    with path.open("rb") as stored:
        stream = encodings.decompress(str(path), stored).stream
        assert b"".join(iter(lambda: stream.read(8 << 20), b"")) == data
        stream.seek(len(data) - 4)
        assert stream.read(9) == data[-4:]
        stream.seek(0)
        assert stream.readline() == b"label,a\n"


def test_decoders_have_a_limit_of_memory(tmp_path: Path) -> None:
    """The limits are those of the headers: neither decoder takes the memory first."""
    data = csv_bytes(make_rows())
    plain = lzma.compress(data)
    header = bytearray(plain[12:24])
    assert header[2:4] == b"\x21\x01", "the filter LZMA2 with one byte of properties"
    header[4] = 36  # 1 GiB
    header[-4:] = struct.pack("<I", zlib.crc32(bytes(header[:-4])))
    message = refused(tmp_path, "huge.csv.xz", plain[:12] + bytes(header) + plain[24:])
    assert "needs more than 256 MB for decompression" in message
    frame = b"\x28\xb5\x2f\xfd\x00" + bytes([(28 - 10) << 3]) + b"\x01\x00\x00"
    message = refused(tmp_path, "huge.csv.zst", frame)
    assert "was compressed by zstd with a window of more than 128 MB" in message


def tar(name: str, form: int, mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, format=form) as archive:  # type: ignore[call-overload]
        member = tarfile.TarInfo(name)
        member.size = 12
        archive.addfile(member, io.BytesIO(b"click,x\n1,2\n"))
    return file.getvalue()


def test_other_archives_and_binary_files_are_recognized(tmp_path: Path) -> None:
    for number, form in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        assert "is a tar archive, which is not supported; unpack it" in refused(
            tmp_path, f"log{number}.csv", tar("a", form)
        )
    for mode in ("gz", "bz2", "xz"):
        data = tar("a", tarfile.GNU_FORMAT, f"w:{mode}")
        assert "is a tar archive" in refused(tmp_path, f"log.tar.{mode}", data)
    old = bytearray(tar("a", tarfile.USTAR_FORMAT))  # as before POSIX: no magic, but a checksum
    old[257:265] = bytes(8)
    old[148:156] = b" " * 8
    old[148:156] = f"{sum(old[:512]):06o}\0 ".encode()
    assert "is a tar archive" in refused(tmp_path, "old.tar", bytes(old))
    for number, (magic, what, remedy) in enumerate(encodings._UNSUPPORTED_FORMATS):
        message = refused(tmp_path, f"file{number}.csv", magic + bytes(600))
        assert f"is {what}, which is not supported; {remedy}" in message
    assert "is compressed twice" in refused(tmp_path, "twice.csv.gz", gzip.compress(bz2.compress(b"click,x\n1,2\n")))
    table = io.BytesIO()
    pq.write_table(pa.table({"click": [0, 1]}), table)
    assert "contains compressed Parquet" in refused(tmp_path, "log.parquet.gz", gzip.compress(table.getvalue()))


@pytest.mark.parametrize("compress", [lambda data: data, gzip.compress], ids=["plain", "gzip"])
def test_lines_that_end_in_cr_alone_are_named(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    data = csv_bytes(make_rows()).replace(b"\n", b"\r")
    assert "has lines that end with a carriage return alone" in refused(tmp_path, "mac.csv", compress(data))
    data = json_bytes(make_rows()).replace(b"\n", b"\r")
    assert "has lines that end with a carriage return alone" in refused(tmp_path, "mac.jsonl", compress(data))


@pytest.mark.parametrize("ending", sample(["", ".zst", ".zip"], 1, seed=0))
@pytest.mark.usefixtures("small_blocks")
def test_json_lines_give_the_rows_of_csv(tmp_path: Path, ending: str) -> None:
    rows = make_rows()
    compress = {"": bytes, ".zst": zstd, ".zip": lambda data: zipped(data, "anything")}[ending]
    csv_dataset = run(tmp_path, "log.csv", csv_bytes(rows), vocabulary=True, min_count=1)
    dataset = run(tmp_path, f"log.jsonl{ending}", compress(json_bytes(rows)), vocabulary=True, min_count=1)
    assert dataset.source_form is not None and dataset.source_form.kind == "jsonl"
    ours, expected = (pa.concat_tables(map(pq.read_table, sorted((tmp_path / name / "train").iterdir())))
                      for name in (f"log.jsonl{ending}.out", "log.csv.out"))  # fmt: skip
    names = {"user_id", "city", "time.hour", "time.weekday"}
    assert {f.name for f in dataset.sparse} == {f.name for f in csv_dataset.sparse} == names
    assert ours.select(expected.column_names).equals(expected)


def test_json_lists_and_weights_give_the_rows_of_parquet(tmp_path: Path) -> None:
    draw = random.Random(3)
    rows = []
    for number in range(200):
        tags = [draw.choice(["a", "b", "c d", ""]) for _ in range(draw.randrange(4))]
        rows.append({
            "label": number % 2, "flag": draw.random() < 0.5, "big": 2**64 - 1 - draw.randrange(3), "tags": tags,
            "history": [draw.randrange(5) for _ in range(draw.randrange(3))] if number % 7 else None,
            "weight_of_tags": [draw.random() for _ in tags],
        })  # fmt: skip
    schema = tmp_path / "schema.yaml"
    schema.write_text("label: label\ncategorical: [flag, big, tags, history]\nweights: {tags: weight_of_tags}\n")
    pq.write_table(pa.Table.from_pylist(rows, pa.schema([
        ("label", pa.int64()), ("flag", pa.bool_()), ("big", pa.uint64()), ("tags", pa.list_(pa.string())),
        ("history", pa.list_(pa.int64())), ("weight_of_tags", pa.list_(pa.float64())),
    ])), tmp_path / "log.parquet")  # fmt: skip
    run(tmp_path, "log.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode(), schema=schema)
    prepare(
        PrepareOptions(sources=[f"{tmp_path}/log.parquet"], out=tmp_path / "expected", schema=schema, hash_rows=500)
    )
    assert parts(tmp_path / "log.jsonl.out") == parts(tmp_path / "expected") != {}


def test_columns_of_json_that_are_no_feature_are_named(tmp_path: Path) -> None:
    lines = [
        {"label": row % 2, "shop_id": row % 5, "device": {"os": "x", "ram": 1}, "spans": [0.5, 1], "bag": [{"id": 1}],
         "mixed": [1] if row % 2 else 1, "tags": ["a"]}
        for row in range(80)
    ]  # fmt: skip
    path = tmp_path / "log.json"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    layout = read_layout(PrepareOptions(sources=[str(path)], out=tmp_path / "out"))
    assert [column.name for column in layout.sparse] == ["shop_id", "tags"] and layout.sparse[1].multi_valued
    assert layout.reasons["device"] == "it holds an object with 'os', 'ram'; write its values as keys of the row"
    assert layout.reasons["bag"].startswith("it holds an object with 'id';")
    assert layout.reasons["spans"].startswith("no feature holds such lists")
    assert layout.reasons["mixed"] == "lists in some rows, and single values in others"
    message = refused(tmp_path, "log.json", path.read_bytes(), sparse=["device"])
    assert "line 1, column 'device' must be a single value, but is an object with 'os', 'ram'; write its" in message


GOOD = b'{"label": 0, "n": 0.5, "c": "x"}\n{"label": 1, "n": 2, "c": "y"}\n' * 20
BAD_ROWS = {
    b'{"label": 0, "n": 1, "c": "x", "c": "y"}': "key 'c' occurs twice",
    b'{"label": 0, "n": 1, "other": {"a": 1, "a": 2}}': "key 'a' occurs twice",
    b'{"label": 0, "n": 18446744073709551616}': "the integer 18446744073709551616 needs more than 64 bits",
    b'{"label": 0, "n": -9223372036854775809}': "the integer -9223372036854775809 needs more than 64 bits",
    b'{"label": 0, "n": ' + b"9" * 5000 + b"}": "needs more than 64 bits; write it as a string",
    b'{"label": 0, "n": 1} {}': "the row is not valid JSON (Extra data)",
    b'{"label": 0, "n": 01}': "the row is not valid JSON (",
    b"": "the row is not valid JSON (",
    b"[1]": "the row must be an object, but is a list",
    b"null": "the row must be an object, but is null",
    b'{"label": 0, "c": "\xff"}': "byte 20 is not UTF-8",
    b'{"label": 0, "c": "\\ud800"}': "column 'c': '\\ud800' is not valid Unicode",
    b'{"label": 0, "a": ' + b"[" * 100_000 + b"}": "the values of the row are nested too deeply",
    b'{"label": 0, "c": "' + b"x" * (1 << 20) + b'"}': "but at most 1,048,576",
    b'{"label": 0, "n": "many"}': "column 'n': 'many' is not a number",
    b'{"label": 3, "n": 1}': "column 'label': '3' is outside 0..1",
    b'{"n": 1}': "column 'label': '' is not a label",
    b'{"label": 0, "n": [1]}': "column 'n' must be a single value, but is a list",
}


@pytest.mark.parametrize("line", BAD_ROWS, ids=lambda line: BAD_ROWS[line][:40])
def test_bad_rows_of_json_are_named(tmp_path: Path, line: bytes) -> None:
    message = refused(tmp_path, "log.jsonl", GOOD + line + b"\n" + GOOD, dense=["n"])
    assert "log.jsonl', line 41, " in message and BAD_ROWS[line] in message and "; fix or remove the line" in message


def test_bad_rows_of_json_are_left_out(tmp_path: Path) -> None:
    data = GOOD + b"".join(line + b"\n" for line in BAD_ROWS) + GOOD
    dataset = run(tmp_path, "log.jsonl", data, bad_rows="skip", max_bad_rows=len(BAD_ROWS), dense=["n"])
    assert dataset.bad_rows is not None and dataset.bad_rows.num_rows == len(BAD_ROWS)
    assert sum(split.num_rows for split in dataset.splits.values()) == 80


def test_numbers_of_json_at_the_edge_of_64_bits_are_kept(tmp_path: Path) -> None:
    numbers = [-(2**63), 2**63 - 1, 2**63, 2**64 - 1, 0]
    lines = [{"label": row % 2, "user_id": numbers[row % 5], "c": row % 3} for row in range(100)]
    run(tmp_path, "log.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode(), sparse=["user_id"])
    rows = "".join(f"{line['label']},{line['user_id']},{line['c']}\n" for line in lines)
    run(tmp_path, "log.csv", f"label,user_id,c\n{rows}".encode(), sparse=["user_id"])
    assert parts(tmp_path / "log.jsonl.out") == parts(tmp_path / "log.csv.out") != {}


@given(st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=8,
))  # fmt: skip
def test_rows_are_decoded_as_by_the_json_module(value: Any) -> None:
    def spelled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spelled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spelled(item) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return repr(value)
        return value

    row = {"key": value}
    assert json_lines.JsonRowDecoder().decode(json.dumps(row).encode()) == spelled(json.loads(json.dumps(row)))


def test_documents_of_several_lines_are_named(tmp_path: Path) -> None:
    rows = [{"label": row % 2, "c": row % 3} for row in range(10)]
    assert "is a single JSON list; write one object a line" in refused(tmp_path, "a.json", json.dumps(rows).encode())
    assert "is a single JSON list" in refused(tmp_path, "b.txt", json.dumps(rows, indent=2).encode())
    assert "has objects that span several lines" in refused(tmp_path, "c.json", json.dumps(rows[0], indent=2).encode())


def test_json_needs_no_name_and_may_begin_with_the_mark_of_utf8(tmp_path: Path) -> None:
    dataset = run(tmp_path, "log", b"\xef\xbb\xbf" + json_bytes(make_rows()))
    assert dataset.source_form is not None and dataset.source_form.kind == "jsonl"
    run(tmp_path, "plain.jsonl", json_bytes(make_rows()))
    assert parts(tmp_path / "log.out") == parts(tmp_path / "plain.jsonl.out")


DELIMITERS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters='"\r\n'), min_size=1, max_size=8
).filter(lambda sign: len(sign.encode()) > 1)
FIELDS = st.text(st.sampled_from('ab",:;|\t \x1f\\é'), max_size=5)


@given(
    DELIMITERS,
    st.lists(st.lists(FIELDS, min_size=3, max_size=3), min_size=1, max_size=6),
    st.sampled_from(["\n", "\r\n"]),
)
def test_lines_are_split_as_python_does(delimiter: str, rows: list[list[str]], end: str) -> None:
    lines = "".join(delimiter.join(row) + end for row in rows)
    expected = [line.split(delimiter) for line in lines.split(end)[:-1]]
    converted = convert_to_csv(lines.encode(), delimiter).decode()
    got = list(csv.reader(io.StringIO(converted, newline=""), delimiter=UNIT_SEPARATOR.decode()))
    assert got == expected


LONG_DELIMITERS = product(delimiter=["::", "||", " | ", "¦", "<->", "::::", "\t\t", "ab"], end=["\n", "\r\n"])


@pytest.mark.parametrize("case", sample(LONG_DELIMITERS, 4, seed=1))
@pytest.mark.usefixtures("small_blocks")
def test_long_delimiters_give_the_rows_of_csv(tmp_path: Path, case: dict[str, str]) -> None:
    delimiter, end = case["delimiter"], case["end"]
    rows = [tuple(field.replace(delimiter, "") for field in row) for row in make_rows()]
    schema = tmp_path / "schema.yaml"
    lines = "".join(delimiter.join(row) + end for row in [HEADER, *rows])
    schema.write_text(
        f"delimiter: {json.dumps(delimiter)}\nlabel: click\ndense: [price]\nsigned: [price]\n"
        "categorical: [user_id, city]\n"
    )
    dataset = run(tmp_path, "ratings.dat", lines.encode(), schema=schema)
    schema.write_text(schema.read_text().replace(json.dumps(delimiter), '","'))
    run(tmp_path, "log.csv", csv_bytes(rows), schema=schema)
    assert parts(tmp_path / "ratings.dat.out") == parts(tmp_path / "log.csv.out") != {}
    assert dataset.source_form is not None and dataset.source_form.delimiter == delimiter
    like = Dataset.load(tmp_path / "ratings.dat.out")
    assert like == dataset


@pytest.mark.parametrize("delimiter", ["::", "\t", ";", "|", ",", " "])
def test_the_delimiter_of_any_file_is_found(tmp_path: Path, delimiter: str) -> None:
    """Like MovieLens: no header, and no usual file name."""
    lines = "".join(delimiter.join((str(row % 2), str(row * 7 % 50), f"u{row % 9}")) + "\n" for row in range(90))
    dataset = run(tmp_path, "u.data", lines.encode())
    assert dataset.source_form is not None and dataset.source_form.delimiter == delimiter
    run(tmp_path, "log.csv", lines.replace(delimiter, ",").encode())
    assert parts(tmp_path / "u.data.out") == parts(tmp_path / "log.csv.out") != {}


def test_text_without_a_delimiter_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, "notes.txt", b"some words here\nand more\nor\n" * 9)
    assert "is it a Criteo click log? Other data may be Parquet, JSON lines, libsvm, libffm" in message


RECBOLE = "user_id:token\titem_id:token\tlabel:float\tprice:float\ttags:token_seq\tvector:float_seq\ttimestamp:float\n"


def test_typed_headers_name_columns_and_their_roles(tmp_path: Path) -> None:
    draw = random.Random(1)
    rows = "".join(
        f"{row}\t{draw.randrange(9)}\t{row % 2}\t{draw.randrange(3)}\t"
        f"{' '.join(draw.sample('abcd', draw.randrange(3)))}\t0.1 0.2\t{1.6e9 + row}\n"
        for row in range(120)
    )
    path = tmp_path / "ml.inter"
    path.write_text(RECBOLE + rows)
    layout = read_layout(PrepareOptions(sources=[str(path)], out=tmp_path / "out", time_features=()))
    assert (layout.labels, layout.dense, layout.time) == (("label",), ("price",), "timestamp")
    assert [(c.name, c.multi_valued, c.separator) for c in layout.sparse] == [
        ("user_id", False, None), ("item_id", False, None), ("tags", True, " "),
    ]  # fmt: skip
    assert layout.reasons["user_id"] == "token, by the header"
    assert layout.reasons["vector"] == "float_seq, by the header: no feature holds lists of numbers"
    schema = tmp_path / "schema.yaml"
    schema.write_text(
        "label: label\ndense: [price]\ncategorical: [user_id, item_id, tags]\nmulti_valued: {tags: ' '}\n"
        "time: timestamp\ntime_features: [timestamp]\n"
    )
    run(tmp_path, "log.inter", path.read_bytes())
    header = "user_id,item_id,label,price,tags,vector,timestamp\n"
    run(tmp_path, "log.csv", (header + rows.replace("\t", ",")).encode(), schema=schema)
    assert parts(tmp_path / "log.inter.out") == parts(tmp_path / "log.csv.out") != {}
    overruled = read_layout(
        PrepareOptions(sources=[str(path)], out=tmp_path / "out", sparse=["price"], dense=["item_id"], time_features=())
    )
    assert overruled.dense == ("item_id",) and overruled.sparse[1].name == "price"


KINDS = {
    "log.csv.bz2": lambda rows: bz2.compress(csv_bytes(rows)),
    "log.csv.xz": lambda rows: lzma.compress(csv_bytes(rows)),
    "log.csv.zst": lambda rows: zstd(csv_bytes(rows)),
    "log.csv.zip": lambda rows: zipped(csv_bytes(rows)),
    "log.jsonl": json_bytes,
    "log.jsonl.gz": lambda rows: gzip.compress(json_bytes(rows)),
    "log.dat": lambda rows: "".join("::".join(row) + "\n" for row in [HEADER, *rows]).encode(),
}


@pytest.mark.parametrize("name", sample(KINDS, 1, seed=4))
@pytest.mark.usefixtures("small_blocks")
def test_preparing_resumes_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(write, "WINDOW_SAMPLES", 64)
    monkeypatch.setattr(staging, "COMMIT_INTERVAL_S", 0.0)
    run(tmp_path, name, KINDS[name](make_rows()))
    options = PrepareOptions(sources=[str(tmp_path / name)], out=tmp_path / "resumed", hash_rows=500)
    calls = 0

    def interrupt(stage: str, rows: int, share: float) -> None:
        nonlocal calls
        calls += stage == "read"
        if calls == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(options, interrupt)
    first_rows: dict[str, int] = {}
    prepare(options, lambda stage, rows, share: first_rows.setdefault(stage, rows) and None)
    assert first_rows["read"] > 0, "it started again"
    assert parts(tmp_path / "resumed") == parts(tmp_path / f"{name}.out")


@pytest.mark.parametrize("name", sample(KINDS, 1, seed=6))
@pytest.mark.usefixtures("small_blocks")
def test_recipes_make_the_rows_or_refuse_to_shuffle(tmp_path: Path, name: str) -> None:
    data = KINDS[name](make_rows())
    expected = run(tmp_path, name, data)
    made = prepare(
        PrepareOptions(sources=[str(tmp_path / name)], out=tmp_path / "recipe", hash_rows=500, recipe_only=True)
    )
    in_order = ReaderOptions(batch_size=50, shuffle=False)
    batches, expected_batches = (list(Reader(one, "train", in_order).epoch()) for one in (made, expected))
    assert len(batches) == len(expected_batches) > 1
    for one, other in zip(batches, expected_batches, strict=True):
        np.testing.assert_array_equal(one.dense.numpy(), other.dense.numpy())
        np.testing.assert_array_equal(one.sparse.values.numpy(), other.sparse.values.numpy())
    shuffled = replace(in_order, shuffle=True)
    if name in ("log.jsonl", "log.dat"):
        assert (
            sum(batch.batch_size for batch in Reader(made, "train", shuffled).epoch())
            == expected.splits["train"].num_rows
        )
    else:
        with pytest.raises(
            MesetaError, match=r"log.* is compressed, or not in UTF-8, so its rows can only be read in order"
        ):
            list(Reader(made, "train", shuffled).epoch())


def test_new_rows_of_other_kinds(tmp_path: Path) -> None:
    """CSV, text with a long delimiter, JSON and Parquet are interchangeable."""
    rows = make_rows()
    earlier = run(tmp_path, "log.csv", csv_bytes(rows))
    expected: dict[str, bytes] = {}
    for name in ("log.csv", "log.jsonl.gz", "log.csv.zst"):
        path = tmp_path / name
        path.write_bytes(KINDS[name](rows) if name in KINDS else csv_bytes(rows))
        out = tmp_path / f"like-{name}"
        prepare_like(PrepareLikeOptions(sources=[str(path)], out=out, like=earlier.dir))
        expected = expected or parts(out)
        assert parts(out) == expected
    path.write_bytes(json_bytes(rows).replace(b"city", b"town"))
    with pytest.raises(MesetaError, match="lacks 'city'; the model needs all features"):
        prepare_like(PrepareLikeOptions(sources=[str(path)], out=tmp_path / "none", like=earlier.dir))
