"""Files on another host behind its link, as a network file system of a cluster.

    python remote_files.py serve ADDRESS:PORT        on the host that has the files

Environment variables name the server and the links. A process takes a free link and connects from its host. Then
`io.FileIO` and `open` read files of the other host.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import json
import os
import socket
import socketserver
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

VARIABLE = "BENCH_REMOTE_FILES"
CLONE_NEWNET = 0x40000000
_open = open


class _Files(socketserver.StreamRequestHandler):
    """Server of ranges of files. A request is [path, offset, size]."""

    def handle(self) -> None:
        with suppress(ConnectionError):  # a reader that has ended
            self._serve()

    def _serve(self) -> None:
        for line in self.rfile:
            path, offset, size = json.loads(line)
            with open(path, "rb") as file:
                if size < 0:
                    self.wfile.write(b"%d\n" % os.fstat(file.fileno()).st_size)
                    continue
                file.seek(offset)
                self.wfile.write(file.read(size))


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


def _free_link(links: list[list[str]], locks: str) -> list[str]:
    for number, files in enumerate(links):
        lock = os.open(f"{locks}/{number}", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return files
        except BlockingIOError:
            os.close(lock)
    raise OSError(f"there are {len(links)} links, and all are taken")


def _connect(address: tuple[str, int], files: list[str]) -> socket.socket:
    """Connect from the network namespace of `files`."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    away = os.open(files[-1], os.O_RDONLY)
    try:
        if libc.setns(away, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        return socket.create_connection(address)
    finally:
        libc.setns(home, CLONE_NEWNET)
        os.close(away)
        os.close(home)


class RemoteFile(io.RawIOBase):
    link: list[str] | None = None

    def __init__(self, path: str | Path) -> None:
        settings = json.loads(os.environ[VARIABLE])
        if RemoteFile.link is None:
            RemoteFile.link = _free_link(settings["links"], settings["locks"])
        self._path = str(path)
        self._socket = _connect(tuple(settings["address"]), RemoteFile.link)
        self._stream = self._socket.makefile("rwb")
        self._at = 0
        self._ask(0, -1)
        self._size = int(self._stream.readline())

    def _ask(self, offset: int, size: int) -> None:
        self._stream.write(json.dumps([self._path, offset, size]).encode() + b"\n")
        self._stream.flush()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        size = min(len(buffer), max(self._size - self._at, 0))
        if size:
            self._ask(self._at, size)
            if self._stream.readinto(memoryview(buffer)[:size]) != size:
                raise OSError("the connection to the remote files was lost")
        self._at += size
        return size

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._socket.close()
        super().close()


def open_remote(name: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
    """Open a raw file on the other host."""
    if mode == "rb" and str(name).startswith(json.loads(os.environ[VARIABLE])["raw"] + "/"):
        return io.BufferedReader(RemoteFile(name), 1 << 20)
    return _open(name, mode, *more, **options)


if __name__ == "__main__":
    host, _, port = sys.argv[2].partition(":")
    with _Server((host, int(port)), _Files) as server:
        print("serving", flush=True)
        server.serve_forever()
