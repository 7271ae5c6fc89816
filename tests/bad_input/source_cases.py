"""Bad source files, in the order of docs/errors.md: compressed ones, archives, JSON lines and other text."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import struct
import tarfile
import zipfile
import zlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bad_input.cases import CSV, Place

ROWS = [dict(zip(("label", "price", "city"), line.split(","), strict=True)) for line in CSV.splitlines()[1:]]
JSON_LINES = "".join(json.dumps({**row, "label": int(row["label"])}) + "\n" for row in ROWS)


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, CSV)
    return file.getvalue()


def archive_of_several_files(place: Place) -> list[Any]:
    return place.prepare("log.zip", zipped("a.csv", "b.csv"))


def encrypted_archive(place: Place) -> list[Any]:
    content = bytearray(zipped("a.csv"))
    content[content.index(b"PK\x01\x02") + 8] |= 1
    return place.prepare("log.zip", bytes(content))


def archive_by_another_method(place: Place) -> list[Any]:
    content = bytearray(zipped("a.csv"))
    content[content.index(b"PK\x01\x02") + 10] = 14
    return place.prepare("log.zip", bytes(content))


def tar_archive(place: Place) -> list[Any]:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.csv"))
    return place.prepare("log.tar.gz", file.getvalue())


def unread_compression(place: Place) -> list[Any]:
    return place.prepare("log.csv.lz4", b"\x04\x22\x4d\x18" + bytes(100))


def compressed_twice(place: Place) -> list[Any]:
    return place.prepare("log.csv.gz", gzip.compress(gzip.compress(CSV.encode())))


def compressed_parquet(place: Place) -> list[Any]:
    return place.prepare("log.gz", gzip.compress(b"PAR1" + bytes(100)))


def xz_of_much_memory(place: Place) -> list[Any]:
    content = bytearray(lzma.compress(CSV.encode()))
    content[16] = 36  # a dictionary of 1 GiB
    content[20:24] = struct.pack("<I", zlib.crc32(content[12:20]))
    return place.prepare("log.csv.xz", bytes(content))


def zstd_of_much_memory(place: Place) -> list[Any]:
    return place.prepare("log.csv.zst", b"\x28\xb5\x2f\xfd\x00" + bytes([(28 - 10) << 3]) + b"\x01\x00\x00")


def lines_of_old_macs(place: Place) -> list[Any]:
    return place.prepare("log.csv", CSV.replace("\n", "\r").encode())


def list_of_json(place: Place) -> list[Any]:
    return place.prepare("log.json", json.dumps(ROWS).encode())


def objects_of_several_lines(place: Place) -> list[Any]:
    return place.prepare("log.json", json.dumps(ROWS[0], indent=1).encode())


def row_of_no_json(place: Place) -> list[Any]:
    return place.prepare("log.jsonl", (JSON_LINES + '{"label": 0,}\n' + JSON_LINES).encode())


def key_of_json_twice(place: Place) -> list[Any]:
    return place.prepare("log.jsonl", (JSON_LINES + '{"label": 0, "label": 1}\n').encode())


def large_integer_of_json(place: Place) -> list[Any]:
    return place.prepare("log.jsonl", (JSON_LINES + f'{{"label": 0, "price": {2**64}}}\n').encode())


def object_in_a_row(place: Place) -> list[Any]:
    return place.prepare(
        "log.jsonl", (JSON_LINES + '{"label": 0, "city": {"name": "x"}}\n').encode(), "--sparse", "city"
    )


def keys_as_values(place: Place) -> list[Any]:
    return place.prepare("log.jsonl", "".join(f'{{"label": 0, "user{row}": 1}}\n' for row in range(500)).encode())


def category_of_other_bytes(place: Place) -> list[Any]:
    return place.prepare("log.csv", CSV.replace("c2", "Köln").encode("cp1252"))


def category_of_no_encoding(place: Place) -> list[Any]:
    return place.prepare("log.csv", CSV.encode().replace(b"c2", b"\x81"), "--encoding", "cp1252")


def unknown_encoding(place: Place) -> list[Any]:
    return place.prepare("log.csv", CSV.encode(), "--encoding", "hex")


def encoding_of_host_names(place: Place) -> list[Any]:
    return place.prepare("log.csv", CSV.encode(), "--encoding", "idna")


def encoding_of_parquet(place: Place) -> list[Any]:
    pq.write_table(pa.table({"label": [0, 1]}), place.folder / "log.parquet")
    return ["prepare", place.folder / "log.parquet", "--out", place.folder / "out", "--encoding", "cp1252"]


def with_schema(place: Place, keys: str) -> list[Any]:
    (place.folder / "schema.yaml").write_text(f"label: label\ndense: [price]\ncategorical: [city]\n{keys}\n")
    return place.prepare("log.csv", CSV.encode(), "--schema", place.folder / "schema.yaml")


def fraction_in_a_list(place: Place) -> list[Any]:
    lists = [[float(row), 3.0] for row in range(399)] + [[0.5]]
    pq.write_table(pa.table({"label": [0, 1] * 200, "seen": lists}), place.folder / "log.parquet")
    return ["prepare", place.folder / "log.parquet", "--out", place.folder / "out", "--sparse", "seen"]


def whole_numbers_of_no_category(place: Place) -> list[Any]:
    return with_schema(place, "whole_numbers: [price]")


def number_with_a_decimal_comma(place: Place) -> list[Any]:
    return place.prepare("log.csv", CSV.encode() + b'1,"12,50",c2\n', "--dense", "price")


def sign_of_two_meanings(place: Place) -> list[Any]:
    return with_schema(place, 'thousands: "."')


def sign_of_several_characters(place: Place) -> list[Any]:
    return with_schema(place, 'decimal: ",,"')


def space_as_decimal_sign(place: Place) -> list[Any]:
    return with_schema(place, 'decimal: " "')


def sign_that_is_a_digit(place: Place) -> list[Any]:
    return with_schema(place, 'strip: "€0"')


SOURCES = (archive_of_several_files, encrypted_archive, archive_by_another_method, tar_archive, unread_compression)
SOURCES += (compressed_twice, compressed_parquet, xz_of_much_memory, zstd_of_much_memory, lines_of_old_macs)
SOURCES += (list_of_json, objects_of_several_lines, row_of_no_json, key_of_json_twice, large_integer_of_json)
SOURCES += (object_in_a_row, keys_as_values, category_of_other_bytes, category_of_no_encoding, unknown_encoding)
SOURCES += (encoding_of_host_names, encoding_of_parquet)
SOURCES += (fraction_in_a_list, whole_numbers_of_no_category, number_with_a_decimal_comma, sign_of_two_meanings)
SOURCES += (sign_of_several_characters, space_as_decimal_sign, sign_that_is_a_digit)
