"""Bad source files: compressed files, archives, JSON lines, other text, Parquet of several types, and folders."""

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
from meseta.data.prepare import PrepareOptions, prepare

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


def parts(place: Place, one: pa.Array, other: pa.Array) -> list[Any]:
    for name, column in (("a", one), ("b", other)):
        table = pa.table({"label": [row % 2 for row in range(len(column))], "shop_id": column})
        pq.write_table(table, place.folder / f"{name}.parquet")
    return ["prepare", place.folder / "a.parquet", place.folder / "b.parquet", "--out", place.folder / "out"]


def columns_of_two_kinds(place: Place) -> list[Any]:
    return parts(place, pa.array([1, 2, 1, 2]), pa.array(["1", "2", "1", "2"]).dictionary_encode())


def digits_that_doubles_lose(place: Place) -> list[Any]:
    return parts(place, pa.array([1.0, 2.0, None, 1.0]), pa.array([1, 2, 2**53 + 1, 2]))


def parquet_text_of_other_bytes(place: Place) -> list[Any]:
    cities = [f"c{row % 5}".encode() for row in range(300)]
    cities[7] = "Köln".encode("cp1252")
    return [*parts(place, pa.array(cities).view(pa.string()), pa.array(["c1", "c2"])), "--sparse", "shop_id"]


def value_outside_its_dictionary(place: Place) -> list[Any]:
    command = parts(place, pa.array([["a", "b"], ["c"]] * 3, pa.list_(pa.dictionary(pa.int32(), pa.string()))),
                    pa.array([["a"]]))  # fmt: skip
    path = place.folder / "a.parquet"
    pq.write_table(pq.read_table(path), path, compression="none")
    content = path.read_bytes()
    for at in range(4, len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 2]) + content[at + 1 :])
        try:
            pq.read_table(path).validate(full=True)
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            if "Dictionary indices invalid" in str(error):
                return command
    raise AssertionError


def folders(place: Place, folder: str, *options: Any, schema: str = "") -> list[Any]:
    """Write CSV below a folder, and return the command with the folder as source."""
    path = place.folder / "logs" / folder
    path.mkdir(parents=True)
    (path / "log.csv").write_text(CSV)
    if schema:
        (place.folder / "schema.yaml").write_text(schema)
        options = (*options, "--schema", place.folder / "schema.yaml")
    return ["prepare", place.folder / "logs", "--out", place.folder / "out", *options]


def folder_without_files(place: Place) -> list[Any]:
    (place.folder / "logs/_temporary").mkdir(parents=True)
    (place.folder / "logs/_temporary/log.csv").write_text(CSV)
    return ["prepare", place.folder / "logs", "--out", place.folder / "out"]


def dataset_as_a_source(place: Place) -> list[Any]:
    return ["prepare", place.data(), "--out", place.folder / "out"]


def key_of_a_folder_in_the_file(place: Place) -> list[Any]:
    return folders(place, "city=x")


def key_of_two_folders(place: Place) -> list[Any]:
    return folders(place, "day=1/day=2")


def folder_of_other_bytes(place: Place) -> list[Any]:
    return folders(place, "day=%ff")


def folder_of_no_number(place: Place) -> list[Any]:
    return folders(place, "hour=noon", "--dense", "hour")


def folder_as_a_list(place: Place) -> list[Any]:
    return folders(place, "tag=a", schema="label: label\ncategorical: [tag]\nmulti_valued: {tag: '|'}\n")


def rows_without_their_folders(place: Place) -> list[Any]:
    earlier = place.folder / "earlier"
    folders(place, "hour=1", schema="label: label\ndense: [hour]\ncategorical: [city]\n")
    prepare(PrepareOptions(sources=[f"{place.folder}/logs"], out=earlier, schema=place.folder / "schema.yaml"))
    return ["prepare", place.folder / "logs/hour=1/log.csv", "--like", earlier, "--out", place.folder / "out"]


SOURCES = (archive_of_several_files, encrypted_archive, archive_by_another_method, tar_archive, unread_compression)
SOURCES += (compressed_twice, compressed_parquet, xz_of_much_memory, zstd_of_much_memory, lines_of_old_macs)
SOURCES += (list_of_json, objects_of_several_lines, row_of_no_json, key_of_json_twice, large_integer_of_json)
SOURCES += (object_in_a_row, keys_as_values, category_of_other_bytes, category_of_no_encoding, unknown_encoding)
SOURCES += (encoding_of_host_names, encoding_of_parquet)
SOURCES += (fraction_in_a_list, whole_numbers_of_no_category, number_with_a_decimal_comma, sign_of_two_meanings)
SOURCES += (sign_of_several_characters, space_as_decimal_sign, sign_that_is_a_digit)
SOURCES += (columns_of_two_kinds, digits_that_doubles_lose, parquet_text_of_other_bytes, value_outside_its_dictionary)
SOURCES += (folder_without_files, dataset_as_a_source, key_of_a_folder_in_the_file, key_of_two_folders)
SOURCES += (folder_of_other_bytes, folder_of_no_number, folder_as_a_list, rows_without_their_folders)
