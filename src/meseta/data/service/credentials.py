"""Tokens that authenticate calls to a dispatcher or a reader: of a command, of a user's port, or of a key folder."""

from __future__ import annotations

import os
import re
import secrets
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meseta.errors import MesetaError
from meseta.system.environment_variables import environ
from meseta.system.files import move, open_regular
from meseta.system.remote import parse_address

TOKEN_HEADER = "authorization"
"""Header of a call that contains the token."""
TOKEN_PATTERN = re.compile(rb"[A-Za-z0-9_-]{43,1024}")
"""Format of a token: at least 32 random bytes as URL-safe text."""
MAX_SECRET_FILE_BYTES = 1 << 16
"""Maximum size in bytes of a token file or a key file."""
TOKEN_FOLDER = ".local/state/meseta"
"""Folder of tokens below the home folder, for systems without $XDG_RUNTIME_DIR."""
_TOKEN_BYTES = 32
_command_credentials: dict[str, Credentials] = {}
"""Credentials that only this process and its forks have, by address of the dispatcher."""


class Credentials(ABC):
    """Thread-safe proof that a caller may use a dispatcher and its readers. Its text representation has no token."""

    @abstractmethod
    def current_token(self) -> bytes:
        """Return the token. Raises `NoTokenError` if there is none yet, and MesetaError if its file is unsafe."""

    @abstractmethod
    def rejection_message(self, who: str) -> str:
        """Return the error message for a call that `who` refused."""

    def header_value(self) -> str:
        """Return the value of `TOKEN_HEADER`. Raises what `current_token` raises."""
        return f"Bearer {self.current_token().decode()}"


class NoTokenError(MesetaError):
    """No token is stored for a port. Its dispatcher may not have started yet."""


class CommandToken(Credentials):
    """Token of one command. The command passes it to its processes and does not store it."""

    def __init__(self, token: bytes) -> None:
        self._token = token

    def current_token(self) -> bytes:
        return self._token

    def rejection_message(self, who: str) -> str:
        return f"{who} does not belong to this command, because it expects another token; run the command again"


class PortToken(Credentials):
    """Token in a file that only this user can read, named by the port of the dispatcher."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._cached: tuple[Path, os.stat_result, bytes] | None = None

    def current_token(self) -> bytes:
        paths = [folder / f"{self._port}.token" for folder in token_folders()]
        stored = {path: status for path in paths if (status := _status(path)) is not None}
        if not stored:
            if self._cached is None:
                names = " or ".join(repr(str(path)) for path in paths)
                raise NoTokenError(f"there is no token of port {self._port}, which its dispatcher stores in {names}")
            return self._cached[2]  # The system removes $XDG_RUNTIME_DIR at logout.
        path = max(stored, key=lambda path: stored[path].st_mtime_ns)
        read = self._cached
        if read is None or read[0] != path or not _is_unchanged(read[1], stored[path]):
            self._cached = read = (path, stored[path], _read_user_token(path))
        return read[2]

    def store(self) -> PortToken:
        """Store the token, and create one if there is none. Raises MesetaError if it cannot be stored."""
        folder = token_folders()[0]
        try:
            # An existing token is kept, because readers and trainers use it while they wait for a restarted dispatcher.
            token = self.current_token()
        except NoTokenError:
            token = new_token()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_private_folder(folder)
            path = folder / f"{self._port}.token"
            unfinished = path.with_name(f".{path.name}-{os.getpid()}")
            # A leftover of a process with the same id.
            unfinished.unlink(missing_ok=True)
            write_secret(unfinished, token + b"\n")
            move(unfinished, path)
        except OSError as error:
            raise MesetaError(
                f"readers: the token of port {self._port} cannot be stored in {str(folder)!r} ({error.strerror}); set "
                "XDG_RUNTIME_DIR to a folder of this user, or use keys (`meseta readers keys`)"
            ) from None
        return self

    def rejection_message(self, who: str) -> str:
        where = "its file" if self._cached is None else repr(str(self._cached[0]))
        return (
            f"{who} expects another token than that in {where}, because another user started it; start `meseta readers "
            "dispatch` at another port, or use keys (`meseta readers keys`)"
        )


def new_token() -> bytes:
    """Return a random token."""
    return secrets.token_urlsafe(_TOKEN_BYTES).encode()


def parse_token(content: bytes, source: str, remedy: str) -> bytes:
    """Return the token in `content`, stripped. Raises MesetaError with `source` and `remedy` if it is invalid."""
    token = content.strip()
    if not TOKEN_PATTERN.fullmatch(token):
        raise MesetaError(
            f"{source} must have 43 or more characters, all of them letters, digits, - and _, got {len(token)} "
            f"characters; {remedy}"
        )
    return token


def credentials_for(url: str) -> Credentials:
    """Return the credentials for an address without keys: of the command that started the dispatcher, or of its port.
    Raises MesetaError if it is invalid."""
    return _command_credentials.get(url) or PortToken(parse_address(url)[1])


@contextmanager
def command_credentials(url: str, credentials: Credentials) -> Iterator[None]:
    """Context manager inside which `credentials_for(url)` returns `credentials`, in this process and its forks."""
    _command_credentials[url] = credentials
    try:
        yield
    finally:
        del _command_credentials[url]


def token_folders() -> list[Path]:
    """Return this user's folders of tokens, first that of new tokens. Raises MesetaError if there is none."""
    folders = []
    with suppress(OSError):
        runtime = Path(environ.get("XDG_RUNTIME_DIR", ""))
        if runtime.is_absolute() and runtime.stat().st_uid == os.geteuid():
            folders.append(runtime / "meseta")
    with suppress(RuntimeError):
        folders.append(Path.home() / TOKEN_FOLDER)
    if not folders:
        raise MesetaError(
            "readers: there is no folder for tokens; set XDG_RUNTIME_DIR or HOME to a folder of this user"
        )
    return folders


def read_secret(path: Path, what: str, remedy: str, *, is_secret: bool = True) -> tuple[bytes, int]:
    """Return (content, owner) of a small regular file.

    Raises MesetaError if it cannot be read, or if `is_secret` and others may read it. `what` and `remedy` are parts of
    the message.
    """
    try:
        with open(open_regular(path), "rb") as file:
            status, content = os.fstat(file.fileno()), file.read(MAX_SECRET_FILE_BYTES + 1)
    except OSError as error:
        raise MesetaError(f"{what}: {str(path)!r} cannot be read ({error.strerror}); {remedy}") from None
    if is_secret and status.st_mode & 0o077:
        raise MesetaError(f"{what}: {str(path)!r} is a secret, but others may read it; chmod 600 {path}")
    return content, status.st_uid


def write_secret(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a new file. Raises OSError if it exists or cannot be written."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


def _read_user_token(path: Path) -> bytes:
    remedy = "remove it, and start the dispatcher again"
    try:
        _check_private_folder(path.parent)
    except OSError as error:
        raise MesetaError(f"readers: {str(path.parent)!r}: {error.strerror}") from None
    content, owner = read_secret(path, "readers", remedy)
    if owner != os.geteuid():
        raise MesetaError(f"readers: {str(path)!r} belongs to another user; {remedy}")
    return parse_token(content, f"readers: {str(path)!r}", remedy)


def _check_private_folder(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(0, "it is not a folder; remove it")
    if status.st_uid != os.geteuid():
        raise PermissionError(0, "it belongs to another user; remove it")
    if status.st_mode & 0o077:
        raise PermissionError(0, f"others may enter it; chmod 700 {folder}")


def _status(path: Path) -> os.stat_result | None:
    with suppress(OSError):
        return path.stat()
    return None


def _is_unchanged(before: os.stat_result, now: os.stat_result) -> bool:
    return os.path.samestat(before, now) and before.st_mtime_ns == now.st_mtime_ns
