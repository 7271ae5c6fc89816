"""The core's columns of Criteo's lines against pyarrow's, for usual lines, unusual ones and rubbish."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.data.formats.tsv import _COLUMN_TYPES as TYPES
from meseta.data.parse_tsv import _parse_with_core, parse_tsv
from meseta.data.parse_tsv.reference import parse_tsv as reference
from meseta.data.schema.layout import RawRows

pytest.importorskip("meseta._C")

LABEL = st.sampled_from([b"0", b"1"])
NUMBER = st.one_of(st.just(b""), st.integers(-(10**18) + 1, 10**18 - 1).map(lambda n: b"%d" % n), st.just(b"-007"))
STRING = st.one_of(
    st.just(b""),
    st.integers(0, 2**32 - 1).map(lambda n: b"%08x" % n),
    st.binary(max_size=40).map(lambda raw: raw.replace(b"\t", b"").replace(b"\n", b"").replace(b"\r", b"")),
)
USUAL = st.tuples(LABEL, *[NUMBER] * 13, *[STRING] * 26).map(b"\t".join)
FIELD = st.one_of(
    NUMBER, STRING, st.sampled_from([b"0.5", b" 3", b"+4", b"9" * 19, b"-", b"a\rb", b'"', b"0x1f", b"1e3"])
)
UNUSUAL = st.lists(FIELD, min_size=38, max_size=42).map(b"\t".join)
LINES = st.tuples(st.lists(USUAL, min_size=1, max_size=20), st.sampled_from([b"\n", b"\r\n"]))


def same(rows: RawRows, expected: RawRows) -> bool:
    assert rows.labels[0].tobytes() == expected.labels[0].tobytes()
    assert [column.tobytes() for column in rows.dense] == [column.tobytes() for column in expected.dense]
    assert [s.values.to_pylist() for s in rows.sparse] == [s.values.to_pylist() for s in expected.sparse]
    return all(s.values.type == pa.binary() and s.values.validate(full=True) is None for s in rows.sparse)


@given(LINES)
def test_usual_lines_are_the_cores(lines: tuple[list[bytes], bytes]) -> None:
    raw = b"".join(line + lines[1] for line in lines[0])
    rows = _parse_with_core(raw, len(lines[0]))
    assert rows is not None and same(rows, reference(raw, TYPES))


@given(st.lists(st.one_of(USUAL, UNUSUAL, st.binary(max_size=300)), max_size=8), st.booleans())
def test_whatever_the_core_takes_is_what_pyarrow_takes(lines: list[bytes], ends: bool) -> None:
    raw = b"\n".join(lines) + b"\n" * ends
    num_rows = raw.count(b"\n")
    rows = _parse_with_core(raw, num_rows)
    if rows is not None:
        assert same(rows, reference(raw, TYPES)) and len(rows.labels[0]) == num_rows


def test_what_the_core_leaves_alone_goes_to_pyarrow() -> None:
    fields = [b"0.5", *[b" 3"] * 13, *[b"x"] * 26]
    raw = b"\t".join(fields) + b"\n"
    assert _parse_with_core(raw, 1) is None
    assert parse_tsv(raw, 1, TYPES).labels[0].tolist() == [0.5]
    with pytest.raises(pa.ArrowInvalid):
        parse_tsv(raw.replace(b" 3", b"a", 1), 1, TYPES)


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_another_number_of_lines_is_not_taken(num_rows: int) -> None:
    line = b"\t".join([b"1", *[b"2"] * 13, *[b"abc"] * 26]) + b"\n"
    assert _parse_with_core(line * 2, num_rows) is None
