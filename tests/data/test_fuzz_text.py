"""Spoiled CSV, libsvm and libffm: prepared whole or refused in one line, never a traceback and never half a folder."""

import csv
import io
import random
import shutil
from pathlib import Path

import pytest

from meseta.data.formats import text as text_format
from meseta.data.prepare import PrepareOptions, prepare
from meseta.spec import MesetaError
from sampling import sample

CASES_PER_TEST = 50
FILES = {
    "log.csv": "label,price,user_id,city\n"
    + "".join(f'{i % 2},{i}.5,{i % 7},"a ""q""\nc,{i % 3}"\n' for i in range(30)),
    "log.tsv": "label\tweight\ttime\tqid\tcity\n"
    + "".join(f'{i % 2}\t{i}.5\t2026-01-{1 + i % 28:02} 10:00Z\t{i % 7}\t"a ""q""\nc\t{i % 3}"\n' for i in range(30)),
    "log.ssv": "label;age;tags;city\n" + "".join(f"{i % 2};{i}.5;a:{i}|b:0.5;c{i % 3}\n" for i in range(30)),
    "log.svm": "".join(f"{2 * (i % 2) - 1:+d} {i % 5}:{i}.5 {i % 4 + 5}:1\n" for i in range(30)),
    "log.qid": "".join(f"{i % 2} qid:{i // 5} {i % 5}:{i}.5 {i % 4 + 5}:1\n" for i in range(30)),
    "log.ffm": "".join(f"{i % 2} 0:{i % 5}:{i}.5 1:{i % 4 + 5}:1 # note\n" for i in range(30)),
}
SCHEMA = """
label: label
categorical: [tags, city]
multi_valued: {tags: "|"}
weights: {tags: ":"}
buckets: {age: 3}
crosses: {c: [age, city]}
delimiter: ";"
"""
PIECES = [
    b'"',
    b",",
    b"\t",
    b";",
    b"|",
    b"qid:",
    b"\n",
    b":",
    b"\r",
    b"#",
    b" ",
    b"\0",
    b"\xff",
    b"-",
    b"e",
    b"9" * 30,
    b"nan",
    b"_",
    b"\xc2\xa0",
]


def spoil(data: bytes, draw: random.Random) -> bytes:
    """Up to four insertions, replacements, deletions or cuts."""
    for _ in range(draw.choice([0, 1, 1, 2, 4])):
        at, piece = draw.randrange(len(data) + 1), draw.choice(PIECES)
        after = draw.choice([data[at:], data[at + 1 :], data[at + draw.randrange(30) :], b""])
        data = data[:at] + piece + after
    return data


def num_csv_rows(data: bytes, delimiter: str) -> int:
    """Count rows like the csv module, without blank lines at the end."""
    rows = list(csv.reader(io.StringIO(data.decode("utf-8-sig", errors="replace"), newline=""), delimiter=delimiter))
    while rows and not rows[-1]:
        rows.pop()
    return len(rows) - 1


@pytest.mark.parametrize("seed", sample(range(40), 2, seed=0))
def test_spoiled_text_is_prepared_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    num_prepared = 0
    for _ in range(CASES_PER_TEST):
        name = draw.choice(sorted(FILES))
        data = spoil(FILES[name].encode(), draw)
        (tmp_path / name).write_bytes(data)
        monkeypatch.setattr(text_format, "BLOCK_BYTES", draw.choice([40, 200, 8 << 20]))
        options = PrepareOptions(
            sources=[str(tmp_path / name)],
            out=tmp_path / "out",
            test_fraction=0.0,
            hash_rows=100,
            num_threads=1,
            schema=tmp_path / "schema.yaml" if name == "log.ssv" else None,
        )
        try:
            dataset = prepare(options)
        except MesetaError as error:
            assert "\n" not in str(error)
            assert not (tmp_path / "out").exists()
        else:
            num_prepared += 1
            delimiter = {"log.csv": ",", "log.tsv": "\t", "log.ssv": ";"}.get(name)
            lines = data.rstrip(b"\r\n").count(b"\n") + 1
            expected = lines if delimiter is None else num_csv_rows(data, delimiter)
            assert dataset.splits["train"].num_rows == expected
            shutil.rmtree(tmp_path / "out")
    assert 0 < num_prepared < CASES_PER_TEST
