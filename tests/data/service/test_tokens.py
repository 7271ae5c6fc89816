"""Tests of the token file of a dispatcher: its place, its permissions and how clients find it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.processes import fact_of
from cli.test_listening import is_loopback, listening_inodes, open_inodes
from data.service.tier import digest
from data.test_reader import make_dataset
from meseta.data import Reader, ReaderOptions
from meseta.data.service.client.reader import ReaderServiceAddress, ServedReader
from meseta.data.service.connection import UnreachableError
from meseta.data.service.credentials import CommandToken, PortToken, credentials_for, new_token, parse_token
from meseta.data.service.dispatcher_client import DispatcherClient
from meseta.data.service.server import local_readers as local_module
from meseta.data.service.server.catalog import Catalog
from meseta.data.service.server.dispatch_server import DispatchServer
from meseta.data.service.server.endpoint_server import Endpoint
from meseta.data.service.server.lease_table import LeaseTable
from meseta.spec import MesetaError
from meseta.system.processes import Program

PORT = 7
OTHER_USER = 65_534


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$XDG_RUNTIME_DIR/meseta, with a separate home folder."""
    (tmp_path / "run").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "run/meseta"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_a_token_is_stored_for_this_user_alone(folder: Path) -> None:
    token = PortToken(PORT).store().current_token()
    assert [path.name for path in folder.iterdir()] == [f"{PORT}.token"]
    assert (mode(folder), mode(folder / f"{PORT}.token")) == (0o700, 0o600)
    assert (folder / f"{PORT}.token").read_bytes() == token + b"\n" and len(token) == 43
    assert credentials_for(f"grpc://127.0.0.1:{PORT}").header_value() == f"Bearer {token.decode()}"
    assert PortToken(8).store().current_token() != token


def test_a_restarted_dispatcher_keeps_its_token() -> None:
    before = PortToken(PORT).store().current_token()
    assert PortToken(PORT).store().current_token() == before


@pytest.mark.parametrize("runtime", [None, "", "run/user", "nowhere", "others"])
def test_below_the_home_folder(runtime: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a runtime folder of this user."""
    if runtime is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / runtime) if "o" in runtime else runtime)
    if runtime == "others":
        give_away(tmp_path / runtime)
    PortToken(PORT).store()
    stored = tmp_path / f"home/.local/state/meseta/{PORT}.token"
    assert (mode(stored), mode(stored.parent)) == (0o600, 0o700)


def give_away(path: Path) -> None:
    """Change the owner of a path, which is created as a folder if it is missing."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    if not path.exists():
        path.mkdir()
    os.chown(path, OTHER_USER, OTHER_USER)


def test_the_newest_of_both_folders_counts(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher may run where there is no runtime folder, and a trainer where there is one."""
    PortToken(PORT).store()
    with monkeypatch.context() as patch:
        patch.delenv("XDG_RUNTIME_DIR")
        time.sleep(0.02)
        later = PortToken(PORT).store().current_token()
    assert PortToken(PORT).current_token() == later
    os.utime(folder / f"{PORT}.token")
    assert PortToken(PORT).current_token() != later


def test_who_runs_follows_a_new_token_and_outlives_its_file(folder: Path) -> None:
    token = PortToken(PORT).store()
    first = token.current_token()
    (folder / f"{PORT}.token").unlink()
    assert token.current_token() == first
    PortToken(PORT).store()
    assert token.current_token() != first


def test_nothing_stored_is_waited_for(folder: Path) -> None:
    with pytest.raises(
        UnreachableError, match=r"dispatcher grpc://127.0.0.1:7 cannot be reached: nothing listens on its port$"
    ):
        DispatcherClient(f"grpc://127.0.0.1:{PORT}").status()


def test_a_dispatcher_of_another_user(tmp_path: Path, folder: Path) -> None:
    """Its token is stored where this user does not look, or this user has one of an earlier dispatcher."""
    dataset = make_dataset(tmp_path / "data", multi_valued=False)
    secret = CommandToken(new_token())
    server = DispatchServer(Endpoint(credentials=secret), Catalog({"click": dataset.dir}), LeaseTable())
    try:
        with pytest.raises(
            UnreachableError, match=rf"there is no token of port {server.port}, which its dispatcher stores"
        ):
            DispatcherClient(server.url).status()
        stored = PortToken(server.port).store()
        with pytest.raises(
            MesetaError, match=rf"expects another token than that in '{folder}/{server.port}.token', because ano"
        ):
            DispatcherClient(server.url).status()
        for text in (repr(stored), repr(secret), repr(server), repr(DispatcherClient(server.url)), str(secret)):
            assert secret.current_token().decode() not in text and stored.current_token().decode() not in text
    finally:
        server.stop()


def readable(path: Path) -> None:
    path.chmod(0o640)


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    path.symlink_to("/dev/zero")


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def short(path: Path) -> None:
    path.write_bytes(b"A" * 42 + b"\n")


def folder_open(path: Path) -> None:
    path.parent.chmod(0o755)


def folder_linked(path: Path) -> None:
    path.parent.rename(path.parent.with_suffix(".old"))
    path.parent.symlink_to(path.parent.with_suffix(".old"))


def folder_given_away(path: Path) -> None:
    give_away(path.parent)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (readable, "7.token' is a secret, but others may read it; chmod 600 "),
        (give_away, "7.token' belongs to another user; remove it"),
        (linked, "7.token' cannot be read .it is a device, not a regular file.; remove it"),
        (emptied, "7.token' must have 43 or more characters, all of them letters, digits, - and _, got 0"),
        (short, "7.token' must have 43 or more characters, all of them letters, digits, - and _, got 42"),
        (folder_open, "others may enter it; chmod 700 "),
        (folder_linked, "it is not a folder; remove it"),
        (folder_given_away, "it belongs to another user; remove it"),
    ],
)
def test_files_that_are_not_safe(spoil: Callable[[Path], None], why: str, folder: Path) -> None:
    """They are neither used nor replaced."""
    PortToken(PORT).store()
    spoil(folder / f"{PORT}.token")
    for use in (PortToken(PORT).current_token, PortToken(PORT).store):
        with pytest.raises(MesetaError, match=why) as refused:
            use()
        assert str(refused.value).isprintable()


def test_no_folder_to_store_in(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(MesetaError, match=r"the token of port 7 cannot be stored in .*; set XDG_RUNTIME_DIR"):
        PortToken(PORT).store()


@pytest.mark.parametrize("content", [b"", b"A" * 42, b"A" * 43 + b" B", b"\xff" * 50, b"A" * 1025])
def test_contents_that_are_no_token(content: bytes) -> None:
    with pytest.raises(
        MesetaError, match=r"the file must have 43 or more characters.*, got \d+ characters; do that$"
    ) as refused:
        parse_token(content, "the file", "do that")
    assert str(refused.value).isprintable()


def test_the_token_of_a_command_is_in_no_file_argument_or_variable(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meseta train --readers`: no file, argument or variable of a process has it, and rows come."""
    dataset = make_dataset(tmp_path / "data", multi_valued=True)
    options = ReaderOptions(batch_size=50, shuffle=True, window_rows=100)
    started: list[Program] = []
    start = local_module.start_program
    monkeypatch.setattr(local_module, "start_program", lambda *a, **k: started.append(start(*a, **k)) or started[-1])
    with local_module.local_readers(dataset.dir, 1, 1) as url:
        token = credentials_for(url).current_token().decode()
        digests = list(map(digest, ServedReader(ReaderServiceAddress(url=url), "train", options).epochs(1)))
        tasks = Path(f"/proc/{started[0].pid}/task").iterdir()
        readers = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        pids = [started[0].pid, *readers]
        seen = [fact_of(pid, name) for pid in (*pids, os.getpid()) for name in ("cmdline", "environ")]
        heard = listening_inodes()
        addresses = [heard[inode] for pid in pids for inode in open_inodes(pid) if inode in heard]
        with pytest.raises(UnreachableError, match="there is no token of port"):
            DispatcherClient(url, PortToken(int(url.rpartition(":")[2]))).status()
    assert digests == list(map(digest, Reader(dataset, "train", options).epochs(1)))
    assert len(readers) == 1 and all(seen) and not [text for text in seen if token in text]
    assert len(addresses) == 2 and all(map(is_loopback, addresses)) and not folder.exists()
