"""Tests of checkpoints at a URL: the manifest commits, damage differs from a partial upload, and errors name the
URL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from checkpoint.saver import save_version
from meseta.checkpoint import Mirror, fetch, latest_complete, verify
from meseta.checkpoint.files import layout
from meseta.checkpoint.store import mirror as copying
from meseta.spec import MesetaError


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 16_384)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a store in this process, and of a folder."""
    yield "memory://bucket/run" if request.param == "memory" else f"file://{tmp_path}/there/run"
    fsspec.filesystem("memory").store.clear()


def steps(mirror: Mirror) -> list[str]:
    return [name.removeprefix("step-00000000") for name in (path.name for path in mirror.checkpoints())]


def test_there_and_back(url: str, tmp_path: Path) -> None:
    mirror = Mirror(url)
    assert steps(mirror) == []
    for version in (2, 4, 6):
        save_version(tmp_path / "here", version)
        mirror.put(tmp_path / f"here/step-00000000{version // 2}")
    assert steps(mirror) == ["1", "2", "3"]
    mirror.delete_except(["step-000000001", "step-000000003"])
    assert steps(mirror) == ["1", "3"]
    for path in (mirror.get(tmp_path / "back"), fetch(f"{url}/step-000000001", tmp_path / "back")):
        assert verify(path) == verify(tmp_path / "here" / path.name)
    assert latest_complete(tmp_path / "back") == tmp_path / "back/step-000000003"
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == ["step-000000001", "step-000000003"]


def test_a_step_saved_again_replaces_the_former(url: str, tmp_path: Path) -> None:
    for version in (2, 3):
        save_version(tmp_path / "here", version)
        Mirror(url).put(tmp_path / "here/step-000000001")
    assert verify(fetch(url, tmp_path / "back")) == verify(tmp_path / "here/step-000000001")


def test_an_upload_that_breaks_off_is_no_checkpoint(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any number of files, the former checkpoint is still the newest, and the next upload completes."""
    save_version(tmp_path, 2)
    save_version(tmp_path, 4)
    mirror = Mirror(url)
    mirror.put(tmp_path / "step-000000001")
    really = copying.copy_file
    num_files = len([p for p in (tmp_path / "step-000000002").rglob("*") if p.is_file()]) - 1
    for left in range(0, num_files, 3):
        calls = [0]

        def break_off(*args: Any, left: int = left, calls: list[int] = calls) -> None:
            calls[0] += 1
            if calls[0] > left:
                raise ConnectionResetError("reset by peer")
            really(*args)

        with monkeypatch.context() as patch:
            patch.setattr(copying, "copy_file", break_off)
            with pytest.raises(MesetaError, match=r"run' cannot be used \(reset by peer\)"):
                mirror.put(tmp_path / "step-000000002")
        assert steps(mirror) == ["1"]
    mirror.put(tmp_path / "step-000000002")
    assert steps(mirror) == ["1", "2"]


def test_half_a_manifest_is_none(tmp_path: Path) -> None:
    save_version(tmp_path / "here", 2)
    mirror = Mirror(f"file://{tmp_path}/there")
    mirror.put(tmp_path / "here/step-000000001")
    manifest = tmp_path / "there/step-000000001/manifest.json"
    text = manifest.read_text()
    for broken in (text[:-50], "[]", json.dumps({**json.loads(text), "step": 7})):
        manifest.write_text(broken)
        assert steps(mirror) == []


def test_damage_is_found_on_the_way_back(tmp_path: Path) -> None:
    save_version(tmp_path / "here", 2)
    Mirror(f"file://{tmp_path}/there").put(tmp_path / "here/step-000000001")
    block = next((tmp_path / "there").rglob("*.arrow"))
    block.write_bytes(block.read_bytes()[:-1])
    with pytest.raises(MesetaError, match=r"must have \d+ bytes, but has"):
        fetch(f"file://{tmp_path}/there", tmp_path / "back")
    assert latest_complete(tmp_path / "back") is None


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("memory://nothing", "holds no checkpoint; check the URL"),
        ("memory://nothing/step-000000007", "holds no checkpoint step-000000007"),
        ("nosuch://bucket", "'nosuch://bucket' cannot be used"),
    ],
)
def test_errors_name_the_url(tmp_path: Path, url: str, what: str) -> None:
    with pytest.raises(MesetaError, match=what):
        fetch(url, tmp_path)


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(MesetaError, match=r"pip install 'meseta\[s3\]'"):
            Mirror("s3://bucket/run")
