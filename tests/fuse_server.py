"""A file system in user space that shows a folder, read-only. While its process is stopped, no read is answered."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_HEADER = struct.Struct("<IIQQIIIHH")
"""Length, operation, request, node, user, group, process, and two that are not used here."""
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE, _FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
_INIT, _OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = 26, 27, 28, 29, 36, 42
_MAX_READ_BYTES = 1 << 17


class Stoppable:
    """A mounted server."""

    def __init__(self, process: int, connection: int) -> None:
        self.process, self._connection = process, connection

    def stop(self) -> None:
        """Stop answering requests."""
        os.kill(self.process, signal.SIGSTOP)

    def resume(self) -> None:
        """Answer again, including pending requests."""
        os.kill(self.process, signal.SIGCONT)

    def abort(self) -> None:
        """Fail every request, so that no process waits for one."""
        with suppress(OSError):
            Path(f"/sys/fs/fuse/connections/{self._connection}/abort").write_text("1")


@contextmanager
def fuse_mount(source: Path, place: Path) -> Iterator[Stoppable]:
    """Show `source` at `place`, which is made; skips the test where that is not allowed."""
    place.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "none", "/sys/fs/fuse/connections"], capture_output=True, check=False)
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"/dev/fuse: {error.strerror}")
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"served", os.fsencode(place), b"fuse", 0, options) != 0:
        os.close(device)
        pytest.skip(f"no FUSE file system can be mounted: {os.strerror(ctypes.get_errno())}")
    server = subprocess.Popen([sys.executable, "-P", __file__, str(source), str(device)], pass_fds=[device])
    os.close(device)
    try:
        mounted = Stoppable(server.pid, os.minor(os.stat(place).st_dev))
        try:
            yield mounted
        finally:
            mounted.abort()
            server.kill()
    finally:
        server.kill()
        server.wait()
        subprocess.run(["umount", "-l", str(place)], check=True)


def _attributes(node: int, path: str) -> bytes:
    status = os.stat(path)
    times = [int(status.st_atime), int(status.st_mtime), int(status.st_ctime), 0, 0, 0]
    return struct.pack(
        "<QQQQQQIIIIIIIIII", node, status.st_size, -(-status.st_size // 512), *times[:3], *times[3:], status.st_mode,
        status.st_nlink, status.st_uid, status.st_gid, 0, 4096, 0,
    )  # fmt: skip


class _Server:
    def __init__(self, source: str) -> None:
        self.paths, self.nodes = {1: source}, {source: 1}

    def answer(self, operation: int, node: int, body: bytes) -> bytes:
        path = self.paths[node]
        if operation == _INIT:
            return struct.pack("<IIIIHHIIHHI28x", 7, 23, _MAX_READ_BYTES, 0, 12, 9, _MAX_READ_BYTES, 1, 0, 0, 0)
        if operation == _LOOKUP:
            inner = os.path.join(path, os.fsdecode(body.rstrip(b"\0")))
            os.stat(inner)
            node = self.nodes.setdefault(inner, len(self.nodes) + 1)
            self.paths[node] = inner
            return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + _attributes(node, inner)
        if operation == _GETATTR:
            return struct.pack("<QII", 0, 0, 0) + _attributes(node, path)
        if operation in (_OPEN, _OPENDIR):
            return struct.pack("<QII", 0, 0, 0)
        if operation == _READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            with open(path, "rb") as file:
                return os.pread(file.fileno(), size, offset)
        if operation == _READDIR:
            _, offset, size = struct.unpack_from("<QQI", body)
            return self._entries(path, offset, size)
        if operation == _STATFS:
            return struct.pack("<QQQQQIIII24x", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 4096, 255, 4096, 0)
        if operation in (_RELEASE, _RELEASEDIR, _FLUSH):
            return b""
        raise OSError(errno.ENOSYS, "")

    @staticmethod
    def _entries(path: str, offset: int, size: int) -> bytes:
        content = b""
        for number, name in enumerate(sorted(os.listdir(path))[offset:], offset + 1):
            kind = stat.S_IFMT(os.stat(os.path.join(path, name)).st_mode) >> 12
            entry = struct.pack("<QQII", number + 1000, number, len(os.fsencode(name)), kind) + os.fsencode(name)
            entry += bytes(-len(entry) % 8)
            if len(content) + len(entry) > size:
                break
            content += entry
        return content


def main(source: str, device: int) -> None:
    server = _Server(source)
    while True:
        try:
            request = os.read(device, _MAX_READ_BYTES + 4096)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                continue
            return  # unmounted, or aborted
        _, operation, number, node, *_ = _HEADER.unpack_from(request)
        if operation in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            continue
        code, content = 0, b""
        try:
            content = server.answer(operation, node if node in server.paths else 1, request[_HEADER.size :])
        except OSError as error:
            code = -(error.errno or errno.EIO)
        with suppress(OSError):  # of a request that was given up
            os.write(device, struct.pack("<IiQ", 16 + len(content), code, number) + content)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
