"""Uploads of objects: small ones in one request, large ones in parallel parts. No torch.

No object is visible before `finish` has returned, and none is after `discard`. File systems that
write in place (sftp, say) cannot promise the first: there, a process that dies leaves a truncated
file, in a folder without a manifest.
"""

from __future__ import annotations

import contextlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from shardwright.checkpoint.storage_path import BLOCK_BYTES, RemotePath
from shardwright.store_requests import call_s3, has_buckets, is_s3, raise_converted, send_request

NUM_PARALLEL_PARTS = 8
"""Parts of one object that are uploaded at the same time; each occupies host memory."""
PARTS_PER_SIZE = 1000
"""Parts of one size; the next ones are twice as large. S3 allows 10,000 parts of up to 5 GiB."""


class ObjectUpload:
    """New object that replaces an existing one when `finish` returns."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._part = bytearray()
        self._parts: _S3Parts | _Stream | None = None
        self._num_parts = 0
        self.is_finished = False

    def write(self, data: memoryview) -> None:
        """Append bytes, which are copied. Errors of a part are raised by a later call."""
        data = data.cast("B")
        while data:
            count = min(len(data), self._compute_part_bytes() - len(self._part))
            self._part += data[:count]
            data = data[count:]
            if len(self._part) == self._compute_part_bytes():
                self._send_part()

    def finish(self) -> None:
        """Upload the rest and publish the object.

        Raises:
            OSError: the object was not published.
        """
        if self._parts is None:
            self._put_whole()
        else:
            if self._part:
                self._send_part()
            self._parts.publish()
        self.is_finished = True

    def discard(self) -> None:
        """Publish nothing and remove the parts that were uploaded. Raises no error."""
        if self._parts is not None and not self.is_finished:
            self._parts.discard()

    def _compute_part_bytes(self) -> int:
        return int(BLOCK_BYTES << (self._num_parts // PARTS_PER_SIZE))

    def _send_part(self) -> None:
        if self._parts is None:
            kind = _S3Parts if is_s3(self._path.file_system) else _Stream
            self._parts = kind(self._path)
        self._num_parts += 1
        self._parts.send(self._part)
        self._part = bytearray()

    def _put_whole(self) -> None:
        file_system = self._path.file_system
        data = bytes(self._part)
        try:
            send_request(
                f"writing {self._path}", lambda: file_system.pipe_file(self._path.path, data)
            )
        except BaseException:
            if not has_buckets(file_system):  # it may be truncated
                _remove_quietly(self._path)
            raise


class _S3Parts:
    """Multi-part upload to S3. Each part is retried for itself."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        bucket, key, _ = path.file_system.split_path(path.path)
        self._target = {"Bucket": bucket, "Key": key}
        self._target["UploadId"] = self._call("create_multipart_upload")["UploadId"]
        self._pool = ThreadPoolExecutor(NUM_PARALLEL_PARTS, thread_name_prefix="checkpoint-upload")
        self._pending: deque[Future[dict[str, Any]]] = deque()
        self._sent: list[dict[str, Any]] = []
        self._num_bytes = 0

    def _call(self, method: str, **options: Any) -> Any:
        return send_request(
            f"writing {self._path}",
            lambda: call_s3(self._path.file_system, method, **self._target, **options),
        )

    def send(self, data: bytearray) -> None:
        """Upload a part in the background; wait while too many are in flight."""
        while len(self._pending) >= NUM_PARALLEL_PARTS:
            self._sent.append(self._pending.popleft().result())
        number = len(self._sent) + len(self._pending) + 1
        self._num_bytes += len(data)
        self._pending.append(self._pool.submit(self._upload_part, number, data))

    def _upload_part(self, number: int, data: bytearray) -> dict[str, Any]:
        response = self._call("upload_part", PartNumber=number, Body=data)
        return {"PartNumber": number, "ETag": response["ETag"]}

    def publish(self) -> None:
        """Wait for all parts and turn them into the object."""
        while self._pending:
            self._sent.append(self._pending.popleft().result())
        self._pool.shutdown()
        try:
            self._call("complete_multipart_upload", MultipartUpload={"Parts": self._sent})
        except FileNotFoundError:
            # The store completed an attempt whose answer was lost, and no longer knows the upload.
            if self._path.read_size() != self._num_bytes:
                raise

    def discard(self) -> None:
        """Abort the upload."""
        for upload in self._pending:
            upload.cancel()
        self._pool.shutdown()
        with contextlib.suppress(OSError):  # another error is being raised already
            self._call("abort_multipart_upload")


class _Stream:
    """Writer of one part after the other, on any file system of fsspec. Nothing is retried."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        with raise_converted():
            self._file = path.file_system.open(path.path, "wb", block_size=BLOCK_BYTES)

    def send(self, data: bytearray) -> None:
        """Write a part."""
        with raise_converted():
            self._file.write(bytes(data))

    def publish(self) -> None:
        """Close the file."""
        with raise_converted():
            self._file.close()

    def discard(self) -> None:
        """Close the file such that no object remains."""
        from fsspec.spec import AbstractBufferedFile

        is_buffered = isinstance(self._file, AbstractBufferedFile)
        with contextlib.suppress(Exception):  # another error is being raised already
            (self._file.discard if is_buffered else self._file.close)()
        if is_buffered:
            self._file.closed = True  # else its `close` or its end of life would publish it
        _remove_quietly(self._path)


def _remove_quietly(path: RemotePath) -> None:
    with contextlib.suppress(Exception):  # another error is being raised already
        path.file_system.rm_file(path.path)
