"""Requests to remote file systems: retries, and errors that can be caught and shown.

Every file system of fsspec has its own exceptions, and the texts of some contain credentials. All
requests of the package go through `send_request`, so that:

- failures that may pass (lost connections, time-outs, HTTP 5xx and 429) are retried with growing
  delays, a bounded number of times;
- all others (no credentials, access denied, a missing bucket) are raised at once;
- what is raised is an OSError, and its text contains no credentials.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar

from shardwright.masking import find_url_secrets, is_masked, mask_secrets

logger = logging.getLogger(__name__)

NUM_ATTEMPTS = 10
"""Attempts of one request, the first included."""
FIRST_DELAY_SECONDS = 0.25
MAX_DELAY_SECONDS = 10.0
"""Longest delay between two attempts. All delays of a request take at most 46 seconds."""
CONNECT_TIMEOUT_SECONDS = 20
READ_TIMEOUT_SECONDS = 60
"""Time-outs of one attempt on S3, unless fsspec's configuration sets others."""
NUM_CONNECTIONS = 32

_S3_SCHEMES = ("s3", "s3a")
_BUCKET_SCHEMES = {*_S3_SCHEMES, "gs", "gcs", "az", "abfs", "abfss", "oss", "oci"}
_FINAL_ERRORS = (
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
)
_PASSING_ERRNOS = {
    None,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EIO,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ETIMEDOUT,
    getattr(errno, "EREMOTEIO", errno.EIO),
}
_PASSING_ERROR_NAMES = {
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectionError",
    "HTTPClientError",
    "HTTPException",
    "IncompleteReadError",
    "ResponseParserError",
    "ServiceRequestError",
    "ServiceResponseError",
}
"""Names of base classes in botocore, aiohttp, http.client and azure.core; the packages may be
absent."""
_PASSING_STATUSES = {408, 429}
_BUGS = (TypeError, AttributeError, AssertionError, NameError, LookupError, MemoryError)
"""Errors that no store causes; they are not converted."""

_S3_CLIENT_NAME = "_shardwright_client"
"""Attribute of an S3 file system with our client for it."""
_S3_CLIENT_LOCK = threading.Lock()

_Result = TypeVar("_Result")


def send_request(action: str, request: Callable[[], _Result]) -> _Result:
    """Return the result of `request`, called again while it fails in a way that may pass.

    Args:
        action: description for warnings, such as `reading s3://bucket/run/latest`.
        request: the call; it must be safe to repeat.

    Raises:
        OSError: the request failed permanently, or `NUM_ATTEMPTS` times.
    """
    for attempt in range(1, NUM_ATTEMPTS + 1):
        try:
            return request()
        except Exception as error:  # every file system has its own exceptions
            if isinstance(error, _BUGS):
                raise
            shown = convert_error(error)
            if attempt == NUM_ATTEMPTS or not _may_pass(error):
                if shown is error:
                    raise
                raise shown from None  # the original's text may contain credentials
            delay_seconds = compute_delay(attempt)
            logger.warning(
                "%s failed (%s); attempt %d of %d follows in %.2g s",
                mask_secrets(action),
                describe_store_error(shown),
                attempt + 1,
                NUM_ATTEMPTS,
                delay_seconds,
            )
        time.sleep(delay_seconds)
    raise AssertionError("the last attempt returns or raises")


def read_range(file_system: Any, path: str, start: int, end: int, shown: object) -> bytes:
    """Return the bytes from `start` to before `end` of a file; fewer if the file ends earlier.

    Args:
        shown: the file, for warnings.

    Raises:
        OSError: as `send_request`.
    """

    def request() -> bytes:
        if is_s3(file_system):
            return _read_s3_range(file_system, path, f"bytes={start}-{end - 1}")
        return bytes(file_system.cat_file(path, start=start, end=end))

    return send_request(f"reading {shown}", request)


def _read_s3_range(file_system: Any, path: str, byte_range: str) -> bytes:
    bucket, key, version = file_system.split_path(path)
    options = {} if version is None else {"VersionId": version}
    answer = call_s3(file_system, "get_object", Bucket=bucket, Key=key, Range=byte_range, **options)
    with closing(answer["Body"]) as body:
        return bytes(body.read())


def call_s3(file_system: Any, method: str, **options: Any) -> Any:
    """Call a method of S3's client once, over a connection of this thread's own.

    s3fs would pass the bytes of all threads through the one thread of its event loop.

    Args:
        options: arguments of the method; those that the file system adds to all are added.
    """
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    client = _get_s3_client(file_system)
    operation = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[method])
    added = file_system.s3_additional_kwargs | file_system.req_kw
    accepted = {name: added[name] for name in added if name in operation.input_shape.members}
    try:
        return getattr(client, method)(**accepted | options)
    except ClientError as error:
        raise translate_boto_error(error) from error


def _get_s3_client(file_system: Any) -> Any:
    """Return botocore's own client with the settings of an S3 file system, one per process."""
    with _S3_CLIENT_LOCK:
        process, client = getattr(file_system, _S3_CLIENT_NAME, (0, None))
        if process != os.getpid():  # a forked process must not share connections
            client = _build_s3_client(file_system)
            setattr(file_system, _S3_CLIENT_NAME, (os.getpid(), client))
    return client


def _build_s3_client(file_system: Any) -> Any:
    from aiobotocore.config import AioConfig
    from botocore import UNSIGNED
    from botocore.session import Session

    credentials = {
        "aws_access_key_id": file_system.key,
        "aws_secret_access_key": file_system.secret,
        "aws_session_token": file_system.token,
    }
    options = {
        "use_ssl": file_system.use_ssl,
        "endpoint_url": file_system.endpoint_url,
        **credentials,
        **file_system.client_kwargs,
    }
    settings = dict(file_system.config_kwargs)
    if file_system.anon:
        options = {name: value for name, value in options.items() if name not in credentials}
        settings["signature_version"] = UNSIGNED
    session = Session(**file_system.kwargs)
    return session.create_client("s3", config=AioConfig(**settings), **options)


def compute_delay(attempt: int) -> float:
    """Return the seconds to wait after a failed attempt: doubled each time, with jitter."""
    longest = min(FIRST_DELAY_SECONDS * 2 ** (attempt - 1), MAX_DELAY_SECONDS)
    return longest * random.uniform(0.5, 1.0)


def convert_error(error: Exception) -> OSError:
    """Return an OSError for an error of a file system's client, without credentials.

    An OSError whose text has none is returned itself.
    """
    text = mask_secrets(str(error))
    if isinstance(error, OSError) and text == str(error):
        return error
    status = _get_status(error)
    kinds = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError}
    kind = next((kind for kind in _FINAL_ERRORS if isinstance(error, kind)), kinds.get(status))
    if kind is not None:
        return kind(text)
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    return OSError(number, f"{type(error).__name__}: {text}")


def describe_store_error(error: Exception) -> str:
    """Return kind and text of an error that `convert_error` returned, the kind once."""
    kind = type(error).__name__
    text = str(error)
    if isinstance(error, OSError) and error.strerror and not error.filename:
        text = error.strerror
        if kind == "OSError" or kind in text:
            return text
    return f"{kind}: {text}"


@contextmanager
def raise_converted() -> Iterator[None]:
    """Convert the errors of a call that cannot be repeated, such as a write to an open stream."""
    try:
        yield
    except Exception as error:  # every file system has its own exceptions
        shown = convert_error(error)
        if shown is error or isinstance(error, _BUGS):
            raise
        raise shown from None


def _may_pass(error: Exception) -> bool:
    """Return True if the same request may succeed later."""
    if isinstance(error, _FINAL_ERRORS):
        return False
    status = _get_status(error)
    if status:
        return status >= 500 or status in _PASSING_STATUSES
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if any(kind.__name__ in _PASSING_ERROR_NAMES for kind in type(error).__mro__):
        return True
    return isinstance(error, OSError) and error.errno in _PASSING_ERRNOS


def _get_status(error: Exception) -> int:
    """Return the HTTP status of an error of aiohttp, azure.core or gcsfs; 0 if it has none."""
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status
    return 0


def open_file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it.

    For S3 the client's own retries are off, so that those of `send_request` are the only ones.

    Raises:
        ImportError: the package of the file system is missing.
        ValueError: an unknown scheme, or credentials where they are not supported.
        OSError: the file system cannot be reached. No text contains the URL's credentials.
    """
    import fsspec

    if is_masked(url):
        raise ValueError(
            "the credentials in this URL are masked, as in every saved copy of a recipe; "
            "use the original recipe, or a URL without credentials"
        )
    scheme = url.partition("://")[0].lower()
    secrets = find_url_secrets(url)
    if scheme in _S3_SCHEMES and secrets:
        raise ValueError(
            "credentials in the URL are not supported for S3; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or use ~/.aws/credentials"
        )
    try:
        file_system, path = fsspec.url_to_fs(url, **_build_options(scheme))
    except ImportError:
        raise
    except Exception as error:  # every file system has its own exceptions
        text = mask_secrets(str(error))
        if any(secret in text for secret in secrets):
            text = "its message is not shown, because it contains a part of the credentials"
        kind = ValueError if isinstance(error, ValueError) else OSError
        remedy = "" if not secrets else "; in passwords, write /, @, : and % as %2F, %40, %3A, %25"
        prefix = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise kind(f"{prefix}{text}{remedy}") from None
    if scheme in _S3_SCHEMES:
        file_system.retries = 1
    return file_system, path


def _build_options(scheme: str) -> dict[str, Any]:
    """Return options of S3 file systems, merged with those of fsspec's configuration."""
    from fsspec.config import conf

    if scheme not in _S3_SCHEMES:
        return {}
    configured: dict[str, Any] = {}
    for name in _S3_SCHEMES:
        configured |= conf.get(name, {}).get("config_kwargs", {})
    return {
        "config_kwargs": {
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "read_timeout": READ_TIMEOUT_SECONDS,
            "max_pool_connections": NUM_CONNECTIONS,
            "retries": {"mode": "standard", "total_max_attempts": 1},
            **configured,
        }
    }


def has_buckets(file_system: Any) -> bool:
    """Return True for object stores, whose folders exist only as parts of names."""
    protocols = file_system.protocol
    names = (protocols,) if isinstance(protocols, str) else protocols
    return not _BUCKET_SCHEMES.isdisjoint(names)


def is_s3(file_system: Any) -> bool:
    """Return True for the S3 file system of the package s3fs."""
    protocols = file_system.protocol
    names = (protocols,) if isinstance(protocols, str) else protocols
    return any(name in _S3_SCHEMES for name in names) and hasattr(file_system, "call_s3")
