"""Tests of atomic file writes by every writer."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from meseta.spec import CostModel, MesetaError, Plan, TableSpec, Topology
from meseta.system.files import format_json, invalid_relative_path_reason, to_file_name, write_atomic

PLAN = Plan.from_dict({"tables": {"a": "table_wise"}}, [TableSpec(name="a", num_embeddings=3, embedding_dim=4)], 1)
WRITERS = {
    "write_whole": lambda path: write_atomic(path, "new"),
    "plan": PLAN.save,
    "topology": Topology().save,
    "cost model": CostModel().save,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_failed_write_leaves_the_old_file(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "file"
    place.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for step in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, full)
            with pytest.raises(
                MesetaError, match="file' cannot be written: No space left on device; choose another file"
            ):
                write(place)
        assert place.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["file"]
    write(place)
    assert place.read_text() != "old" and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_places_that_cannot_become_a_file(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to("round")
    for place, reason in (
        (tmp_path, "is a folder; name a file"),
        (tmp_path / "no" / "f", "folder does not exist"),
        (tmp_path / "round", "Too many levels of symbolic links; choose another file"),
        (tmp_path / "round" / "f", "Too many levels of symbolic links; choose another file"),
    ):
        with pytest.raises(MesetaError, match=reason):
            PLAN.save(place)


def test_links_stay_and_name_the_new_file(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    write_atomic(link, "new")
    assert link.is_symlink() and target.read_text() == "new"


def test_special_files_are_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomic(pipe, "new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_files_are_as_open_as_the_user_has_it(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    write_atomic(tmp_path / "own", "caf\u00e9 \ud800")
    assert (tmp_path / "own").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert (tmp_path / "own").read_bytes() == b"caf\xc3\xa9 ?"


def test_every_name_gives_a_separate_file() -> None:
    assert [to_file_name(name) for name in ("user", "a/b", "..", "año")] == ["user", "a%2Fb", ".%2E", "a%C3%B1o"]
    names = ["x" * 300, "x" * 301, "x" * 150, "x" * 151, "列" * 40, "列" * 41, "a.", "/" * 300]
    files = [to_file_name(name) for name in names]
    assert len(set(files)) == len(names) and files[2] == names[2]
    for name in files:
        assert (
            invalid_relative_path_reason(f"{name}.safetensors") is None
            and invalid_relative_path_reason(name) is None
            and len(name) <= 150
        )


def test_json_has_a_line_for_each_entry_of_two_levels() -> None:
    shallow = {"a": 1.5, "b": ["x", None], "ä": {"c": True}, "empty": {}}
    assert format_json(shallow) == json.dumps(shallow, indent=1) + "\n"
    deep = {"tables": {"t": {"rows": [0, 9], "of": {"no text": {3: 4}}}}, "list": ({1: 2}, (), [[[]]])}
    text = format_json(deep)
    assert json.loads(text) == json.loads(json.dumps(deep))
    assert text.splitlines()[2] == '  "t": {"rows": [0, 9], "of": {"no text": {"3": 4}}}'
