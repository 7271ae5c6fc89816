"""Tests of untrusted files and names: refused file types, size limits, and names that must be inside a folder."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from meseta.spec import MesetaError
from meseta.spec.documents import load_document, read_mapping
from meseta.system.files import (
    MAX_DOCUMENT_VALUES,
    MAX_STRING_LENGTH,
    first_name_collision,
    invalid_relative_path_reason,
    open_regular,
    parse_json,
    read_bounded,
    resolve_inside,
)
from meseta.system.yaml_text import parse_yaml


def test_special_files_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are limited
    os.mkfifo("fifo")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("socket")
    places = {"fifo": "a FIFO", "socket": "a socket", "/dev/zero": "a device", ".": "Is a directory"}
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
    for place, kind in places.items():
        with pytest.raises(OSError, match=kind):
            open_regular(place)
        with pytest.raises(MesetaError, match=rf"^plan file '{place}': .*{kind}"):
            load_document("plan", place, dict)
    listening.close()


def test_no_more_is_read_than_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert read_bounded(tmp_path / "file", 3) == b"abc"
    with pytest.raises(OSError, match="more than 2 bytes"):
        read_bounded(tmp_path / "file", 2)
    with (tmp_path / "file").open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(MesetaError, match="more than 33,554,432 bytes"):
        read_mapping(tmp_path / "file")


def test_links_may_not_lead_out(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/file").write_text("")
    (tmp_path / "secret").write_text("")
    links = {"round": "deep/../deep/file", "out": "../secret", "up": "..", "absolute": "/etc", "short": "deep"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    for name in ("deep/file", "round", "short/file"):
        assert resolve_inside(folder, name) == folder / name
    for name in ("out", "up/secret", "absolute/hostname", "up"):
        with pytest.raises(OSError, match="a link leads out of"):
            resolve_inside(folder, name)
    for name, what in (("nowhere", "No such file"), ("deep", "Is a directory")):
        with pytest.raises(OSError, match=what):
            resolve_inside(folder, name)
    (tmp_path / "another").symlink_to(folder)
    assert resolve_inside(tmp_path / "another", "deep/file").exists()


@pytest.mark.parametrize("path", ["a", "train/part-00000.parquet", "a b/.hidden", "größe/价格", "x" * 255])
def test_names_inside(path: str) -> None:
    assert invalid_relative_path_reason(path) is None


@pytest.mark.parametrize(
    "path",
    [
        *("", "/a", "..", "../a", "a/..", "a/../b", "a//b", "./a", "a/.", "a/", "a.", "a. /b", "a\0", "a\n", "\x1b[2J"),
        *("a\\b", "C:a", "x" * 256, "é" * 128, "a/" * 3000 + "a"),
    ],
)
def test_names_that_are_none(path: str) -> None:
    assert invalid_relative_path_reason(path)


def test_names_that_a_file_system_takes_for_one() -> None:
    assert first_name_collision(["a", "b", "a/b"]) is None
    for one, other in (
        ("a", "a"),
        ("User", "uSER"),
        ("\u00e9", "e\u0301"),
        ("\ufb01", "FI"),
        ("stra\u00dfe", "STRASSE"),
    ):
        assert first_name_collision(["x", one, other]) == (one, other)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"\xff", b"\xef\xbb\xbf{}", b'{"a":1,"a":2}', b'[{"b":{"a":1,"a":2}}]', b"[NaN]", b"[1e999]"),
        *(b"[-Infinity]", b'["\\ud800"]', b'{"\\udfff":0}', b"[" * 66 + b"]" * 66, b"[" * 10**6, b"9" * 5000),
        b"[" + b"0," * MAX_DOCUMENT_VALUES + b"0]",
        b'["' + b"x" * (MAX_STRING_LENGTH + 1) + b'"]',
    ],
    ids=lambda content: content[:9].hex(),
)
def test_texts_that_are_no_json(content: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(content)


def test_json_round_trip() -> None:
    document = {"a": [1, -2.5, None, True, "é\U0001f600"], "b": {"": {}}, "c": 10**300}
    assert parse_json(json.dumps(document).encode()) == document
    assert parse_json(json.dumps(document, ensure_ascii=False).encode()) == document
    assert parse_json(b"[Infinity]", finite=False) == [float("inf")]
    assert parse_json(b'["' + b"x" * MAX_STRING_LENGTH + b'"]') == ["x" * MAX_STRING_LENGTH]


def bomb(levels: int) -> str:
    """Return a text of a few hundred bytes that expands to 10 to the power of `levels` values."""
    lines = ["a0: &a0 x", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels + 1))]
    return "\n".join(lines)


@pytest.mark.parametrize("text", [bomb(9), "a: &a [*a]", "a: &a {b: *a}", "{a: &a [1], <<: &b {c: *b}}"])
def test_aliases_that_expand_to_too_much(text: str) -> None:
    with pytest.raises(MesetaError, match="its aliases expand to more"):
        parse_yaml(text)


def test_aliases_are_read() -> None:
    assert len(parse_yaml(bomb(4))["a4"]) == 10
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}}


@pytest.mark.parametrize("text", ["[0" + ",0" * 400_000 + "]", "- 0\n" * 400_001])
def test_yaml_of_too_many_values(text: str) -> None:
    with pytest.raises(MesetaError, match="it has more than 400,000 values"):
        parse_yaml(text)


@pytest.mark.parametrize(
    "document", [{"a": 1e-07, "b": "1e-07", "c": ["é", None]}, {"x": {str(i): i for i in range(9)}}]
)
def test_json_files_are_read_as_json(tmp_path: Path, document: dict[str, Any]) -> None:
    (tmp_path / "f").write_text(json.dumps(document, ensure_ascii=False))
    assert read_mapping(tmp_path / "f") == document
    (tmp_path / "f").write_text('{"a": 1, "a": 2}')
    with pytest.raises(MesetaError, match="key 'a' is given twice, again in line 1"):
        read_mapping(tmp_path / "f")
