"""Names of files that fsspec reads: s3://, gs://, hdfs://, https://, memory:// and others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meseta.spec.errors import MesetaError, one_line

_EXTRAS = {"s3": "meseta[s3]", "s3a": "meseta[s3]", "gs": "meseta[gcs]", "gcs": "meseta[gcs]", "https": "fsspec[http]"}


def is_url(name: object) -> bool:
    """Whether fsspec reads it; anything else is a path on this machine."""
    return "://" in str(name)


@contextmanager
def remote_errors(what: str, url: str, verb: str) -> Iterator[None]:
    """Turn what file systems raise for the `url` of `what`, such as a source that cannot be `verb` "read", into one
    MesetaError that names it; each file system has exceptions of its own."""
    try:
        yield
    except MesetaError:
        raise
    except ImportError as error:
        scheme = url.partition("://")[0].rpartition("::")[2]
        package = _EXTRAS.get(scheme, f"fsspec[{scheme}]")
        detail = " ".join(str(error).split())
        raise MesetaError(
            f"{what} {url!r}: {scheme}:// needs a package that is not installed ({detail}); pip install '{package}'"
        ) from None
    except Exception as error:
        raise MesetaError(
            f"{what} {url!r} cannot be {verb} ({one_line(error)}); check the URL, the network and the credentials"
        ) from None
