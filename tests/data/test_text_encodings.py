"""Text in any encoding of Python gives the rows of the same text in UTF-8; bytes that are none are named."""

from __future__ import annotations

import bz2
import codecs
import encodings.aliases
import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bad_input.commands import run_here
from data.click_log import make_lines
from meseta.data import Dataset, PrepareOptions
from meseta.data.formats import encodings as encodings_module
from meseta.data.formats import text as text_format
from meseta.data.formats.encodings import transcode_to_utf8
from meseta.data.prepare import prepare, read_layout
from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like
from meseta.data.schema.schema import format_schema
from meseta.data.schema.text_syntax import check_encoding
from meseta.spec import MesetaError
from sampling import product, sample
from small_run import settings, train

CITIES = ("Köln", "León", "Ávila", "Paris", "naïve, quoted", "Москва", "東京", "€uro", "")


def text_codecs() -> list[str]:
    """Every codec of Python that encodes text."""
    names = []
    for name in sorted({*encodings.aliases.aliases.values(), "utf_8_sig"}):
        try:
            "a,1\n".encode(name).decode(name)
        except (LookupError, UnicodeError, TypeError, ValueError, AttributeError):
            continue
        names.append(name)
    return names


CODECS = [name for name in text_codecs() if name not in ("idna", "punycode")]


def csv_text(codec: str = "utf-8", num_rows: int = 200) -> str:
    """With those cities alone that a codec has."""
    cities = [city for city in CITIES if _encodes(city, codec)]
    rows = [f'{row % 2},{row}.5,"{cities[row * row % 31 % len(cities)]}"\n' for row in range(num_rows)]
    return "click,price,city\n" + "".join(rows)


def _encodes(text: str, codec: str) -> bool:
    try:
        return text.encode(codec).decode(codec) == text
    except UnicodeError:
        return False


def parts(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.parquet"))}


def run(tmp_path: Path, name: str, data: bytes, **options: Any) -> Dataset:
    (tmp_path / name).write_bytes(data)
    return prepare(
        PrepareOptions(sources=[f"{tmp_path}/{name}"], out=tmp_path / f"{name}.out", hash_rows=500, **options)
    )


def refused(tmp_path: Path, name: str, data: bytes, **options: Any) -> str:
    with pytest.raises(MesetaError) as caught:
        run(tmp_path, name, data, **options)
    assert "\n" not in str(caught.value) and not (tmp_path / f"{name}.out").exists()
    return str(caught.value)


def test_there_are_many_codecs() -> None:
    assert len(CODECS) > 90 and {"cp1252", "latin_1", "shift_jis", "utf_16", "utf_7", "gb18030", "cp500"} <= {*CODECS}


@pytest.mark.parametrize("codec", sample(CODECS, 6, seed=2))
def test_any_encoding_gives_the_rows_of_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", 1500)
    monkeypatch.setattr(encodings_module, "_CHUNK_BYTES", 7)
    text = csv_text(codec)
    run(tmp_path, "plain.csv", text.encode())
    dataset = run(tmp_path, "log.csv", text.encode(codec), encoding=codec)
    assert parts(tmp_path / "log.csv.out") == parts(tmp_path / "plain.csv.out") != {}
    assert dataset.source_form is not None and dataset.source_form.encoding == codecs.lookup(codec).name
    run(tmp_path, "log.csv.bz2", bz2.compress(text.encode(codec)), encoding=codec)
    assert parts(tmp_path / "log.csv.bz2.out") == parts(tmp_path / "plain.csv.out")


@given(st.sampled_from(CODECS), st.text(max_size=40), st.integers(1, 9))
def test_streams_are_decoded_as_whole_texts_are(codec: str, text: str, size: int) -> None:
    data = text.encode(codec, errors="ignore")
    try:
        expected = data.decode(codec).encode()
    except UnicodeError:
        return
    chunk, encodings_module._CHUNK_BYTES = encodings_module._CHUNK_BYTES, size
    try:
        stream = transcode_to_utf8(io.BytesIO(data), codec)
        assert stream.read() == expected
        stream.seek(0)
        assert b"".join(iter(lambda: stream.read(size), b"")) == expected
        stream.seek(len(expected) // 2)
        assert stream.read() == expected[len(expected) // 2 :]
    finally:
        encodings_module._CHUNK_BYTES = chunk


MARKED = product(
    codec=["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"], kind=["csv", "jsonl", "tsv"]
)


@pytest.mark.parametrize("case", sample(MARKED, 4, seed=0))
def test_utf16_is_recognized_by_its_mark(tmp_path: Path, case: dict[str, str]) -> None:
    codec, kind = case["codec"], case["kind"]
    if kind == "csv":
        text = csv_text()
    elif kind == "tsv":
        text = "\n".join(make_lines(60)) + "\n"
    else:
        text = "".join(
            json.dumps({"label": row % 2, "city": CITIES[row % 8]}, ensure_ascii=False) + "\n" for row in range(90)
        )
    run(tmp_path, f"plain.{kind}", text.encode())
    mark = b"" if codec in ("utf-16", "utf-32") else "\ufeff".encode(codec)
    run(tmp_path, f"log.{kind}", mark + text.encode(codec))
    assert parts(tmp_path / f"log.{kind}.out") == parts(tmp_path / f"plain.{kind}.out") != {}


@pytest.mark.parametrize("name", ["rot13", "hex", "base64", "zip", "idna", "punycode", "undefined", "nosuch", "a\0b"])
def test_what_is_no_encoding_of_files_is_named(tmp_path: Path, name: str) -> None:
    message = refused(tmp_path, "log.csv", b"click,x\n0,1\n", encoding=name)
    assert message.startswith(f"encoding {name!r} ")
    with pytest.raises(MesetaError, match="use one such as latin-1, cp1252, utf-16 or shift_jis"):
        check_encoding(name)


def test_an_encoding_is_for_text(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pa.table({"label": [0, 1]}), buffer)
    message = refused(tmp_path, "log.parquet", buffer.getvalue(), encoding="cp1252")
    assert "an encoding is for text, but " in message
    assert message.endswith("log.parquet' is Parquet; remove the encoding")


BAD = csv_text().encode().replace("Köln".encode(), "Köln".encode("cp1252"))
FIRST = 1 + BAD.splitlines().index(next(line for line in BAD.splitlines() if b"K\xf6ln" in line))


def test_bytes_that_are_no_utf8_are_bad_rows(tmp_path: Path) -> None:
    message = refused(tmp_path, "log.csv", BAD)
    assert (
        rf"log.csv', line {FIRST}, column 'city': 'K\xf6ln' is not UTF-8; name the encoding of the file with" in message
    )
    assert "--encoding, or as encoding in a --schema file; fix or remove the line" in message
    dataset = run(tmp_path, "skip.csv", BAD, bad_rows="skip", max_bad_rows=0.5)
    assert dataset.bad_rows is not None and dataset.bad_rows.num_rows == BAD.count(b"K\xf6ln")
    assert f"line {FIRST}, column 'city'" in dataset.bad_rows.first[0]


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_values_that_differ_in_such_bytes_alone_are_no_constant(tmp_path: Path, name: str) -> None:
    letters = [bytes([0xE0 + row % 9]) for row in range(200)]
    if name == "log.csv":
        data = b"click,city\n" + b"".join(b"%d,%b\n" % (row % 2, letter) for row, letter in enumerate(letters))
    else:
        offsets = pa.array(range(201), pa.int32()).buffers()[1]
        cities = pa.Array.from_buffers(pa.string(), 200, [None, offsets, pa.py_buffer(b"".join(letters))])
        file = io.BytesIO()
        pq.write_table(pa.table({"click": [0, 1] * 100, "city": cities}), file)
        data = file.getvalue()
    assert re.search("(line 2|row 1), column 'city': .*UTF-8", refused(tmp_path, name, data))


@pytest.mark.parametrize("name", ["log.dat", "log.tsv", "lists.csv"])
def test_other_text_names_the_row_too(tmp_path: Path, name: str) -> None:
    schema = tmp_path / "schema.yaml"
    if name == "log.tsv":
        lines = make_lines(60)
        lines[40] = lines[40].rpartition("\t")[0] + "\tK\xf6ln"
        message = refused(tmp_path, name, ("\n".join(lines) + "\n").encode("latin-1"))
        assert r"line 41, column 'cat_25': 'K\xf6ln' is not UTF-8" in message
        return
    delimiter, field = ("::", '"K\xf6ln"') if name == "log.dat" else (",", "a|K\xf6ln|b")
    schema.write_text(
        f"label: click\ncategorical: [city]\ndelimiter: '{delimiter}'\n"
        + ("multi_valued: {city: '|'}\n" if name == "lists.csv" else "")
    )
    rows = "".join(f"{row % 2}{delimiter}{field if row == 50 else 'x'}\n" for row in range(90))
    message = refused(tmp_path, name, f"click{delimiter}city\n{rows}".encode("latin-1"), schema=schema)
    assert "line 52, column 'city': " in message and r"K\xf6ln" in message and "is not UTF-8" in message


def test_bytes_that_an_encoding_does_not_define_are_bad_rows(tmp_path: Path) -> None:
    """The bytes around them may be valid UTF-8."""
    data = csv_text("cp1252").encode("cp1252").replace(b"Paris", b"Par\x81is", 1)
    message = refused(tmp_path, "log.csv", data, encoding="cp1252")
    assert "column 'city': the value has bytes that cp1252 does not define" in message


@pytest.mark.parametrize("codec", sample(["shift_jis", "ascii", "utf-16-le", "utf-7"], 1, seed=0))
def test_bytes_that_no_text_has_are_refused(tmp_path: Path, codec: str) -> None:
    whole = csv_text(codec).encode(codec)
    at = len("click,price,city\n0,0.5,".encode(codec))
    broken = whole[:at] + {"utf-16-le": b"\x00\xdcx\x00"}.get(codec, b'"\xff\xfe"') + whole[at:]
    assert f"{codec}.csv" in refused(tmp_path, f"{codec}.csv", broken, encoding=codec)


def test_the_encoding_is_stored_and_used_for_new_rows(tmp_path: Path) -> None:
    text = csv_text("cp1252")
    earlier = run(tmp_path, "log.csv", text.encode("cp1252"), encoding="cp1252")
    (tmp_path / "utf8.csv").write_bytes(text.encode())
    expected = None
    for name, options in (("log.csv", {}), ("utf8.csv", {"encoding": "utf-8"})):
        out = tmp_path / f"like-{name}"
        prepare_like(PrepareLikeOptions(sources=[f"{tmp_path}/{name}"], out=out, like=earlier.dir, **options))
        expected = expected or parts(out)
        assert parts(out) == expected != {}


def test_a_header_of_another_encoding_is_named(tmp_path: Path) -> None:
    message = refused(tmp_path, "log.csv", "click,país\n0,x\n1,y\n".encode("latin-1"))
    assert "line 1: the header is not UTF-8 CSV" in message
    assert message.endswith("; name the encoding of the file with --encoding")


def test_a_schema_names_the_encoding(tmp_path: Path) -> None:
    text = csv_text("cp1252")
    (tmp_path / "log.csv").write_bytes(text.encode("cp1252"))
    options = PrepareOptions(sources=[f"{tmp_path}/log.csv"], out=tmp_path / "out", encoding="windows-1252")
    schema = tmp_path / "schema.yaml"
    schema.write_text(format_schema(read_layout(options)))
    assert "encoding: cp1252\n" in schema.read_text()
    run(tmp_path, "log.csv", text.encode("cp1252"), schema=schema)
    run(tmp_path, "plain.csv", text.encode())
    assert parts(tmp_path / "log.csv.out") == parts(tmp_path / "plain.csv.out")
    overruled = run(tmp_path, "utf8.csv", text.encode(), schema=schema, encoding="utf-8")
    assert overruled.source_form is not None and overruled.source_form.encoding == "utf-8"
    assert parts(tmp_path / "utf8.csv.out") == parts(tmp_path / "plain.csv.out")


def test_former_datasets_keep_raw_bytes(tmp_path: Path) -> None:
    earlier = run(tmp_path, "log.csv", csv_text().encode())
    path = earlier.dir / "dataset.json"
    document = json.loads(path.read_text())
    assert document["source_form"].pop("encoding") == "utf-8"
    (tmp_path / "bad.csv").write_bytes(BAD)
    with pytest.raises(MesetaError, match="is not UTF-8"):
        prepare_like(PrepareLikeOptions(sources=[f"{tmp_path}/bad.csv"], out=tmp_path / "new", like=earlier.dir))
    path.write_text(json.dumps(document))
    prepare_like(PrepareLikeOptions(sources=[f"{tmp_path}/bad.csv"], out=tmp_path / "new", like=earlier.dir))
    assert parts(tmp_path / "new") != {}


@pytest.mark.soak
def test_predictions_of_new_rows_take_an_encoding(tmp_path: Path) -> None:
    text = csv_text("cp1252")
    data = run(tmp_path, "log.csv", text.encode("cp1252"), encoding="cp1252").dir
    train(settings(data, tmp_path / "run", train__max_steps=2))
    (tmp_path / "utf8.csv").write_bytes(text.encode())
    predicted = []
    for name, options in (("log.csv", ()), ("utf8.csv", ("--encoding", "utf-8"))):
        out = tmp_path / f"{name}.predicted.csv"
        ended = run_here("predict", tmp_path / "run", "--data", tmp_path / name, "--out", out, *options)
        assert ended.code == 0, ended.err
        predicted.append(out.read_bytes())
    assert predicted[0] == predicted[1]
    ended = run_here("predict", tmp_path / "run", "--out", tmp_path / "none.csv", "--encoding", "cp1252")
    assert ended.errors == ["error: predict: --encoding needs raw files in --data; omit it"]
