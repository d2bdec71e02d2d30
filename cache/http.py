"""An HTTP server as a store, in the layout of Bazel's remote cache: GET, HEAD, PUT (and DELETE) of /ac/ and /cas/.

Any server that keeps what is PUT there will do: nginx with WebDAV, bazel-remote (with its check of ac entries turned
off, since ours are no Bazel results). Plain HTTP has no compare-and-set, so leases are the weak kind of store.Store.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import ssl
from collections import deque
from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urlsplit

from .store import Stat, Store, StoreError, checked

_IDLE = 4  # connections kept open
_STATUS = {
    401: "denied",
    403: "denied",
    405: "unsupported",
    413: "full",
    501: "unsupported",
    507: "full",
}


class HttpStore(Store):
    """`url` is http(s)://[user:password@]host[:port][/base]. Redirects are not followed and proxies not used: bytes
    that are to be run come from the server that was named or not at all. `headers` go with every request."""

    def __init__(
        self, url: str, *, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None, label: str = "http"
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("an HTTP store needs http://host or https://host")
        self.label = label
        self._host, self._port = parts.hostname, parts.port
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"User-Agent": "fused-eager", **(headers or {})}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(login).decode()}"
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._pid = os.getpid()

    def get(self, name: str, limit: int) -> bytes | None:
        status, data, _ = self._ask("GET", name, None, limit)
        if status in (404, 410):
            return None
        if status != 200:
            raise _error(status)
        if len(data) > limit:
            raise StoreError("too-large", f"{name} has more than {limit} bytes")
        # a lease that could not be deleted is an empty one
        return None if not data and name.startswith("lease/") else data

    def put(self, name: str, data: bytes) -> None:
        status, _, _ = self._ask("PUT", name, data, 4096)
        if status not in (200, 201, 202, 204):
            raise _error(status)

    def delete(self, name: str) -> None:
        status, _, _ = self._ask("DELETE", name, None, 4096)
        if status not in (200, 202, 204, 404, 410):
            raise _error(status)

    def stat(self, name: str) -> Stat | None:
        status, _, length = self._ask("HEAD", name, None, 0)
        if status in (404, 410):
            return None
        if status != 200:
            raise _error(status)
        return Stat(name, length, 0.0)

    def list(self, kind: str) -> Iterator[Stat]:
        raise StoreError("unsupported", "an HTTP cache has no listing")

    def swap(self, name: str, expect: bytes | None, data: bytes | None, ttl_s: float) -> bool:
        try:
            return super().swap(name, expect, data, ttl_s)
        except StoreError as error:
            if error.code != "unsupported" or data is not None:
                raise
            self.put(name, b"")
            return True

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _path(self, name: str) -> str:
        kind, digest = checked(name).split("/")
        if kind == "lease":  # the layout knows two folders; this is a name that no key has
            kind, digest = "ac", hashlib.sha256(b"fused-eager/lease/1\0" + digest.encode()).hexdigest()
        return f"{self._base}/{kind}/{digest}"

    def _ask(self, method: str, name: str, body: bytes | None, limit: int) -> tuple[int, bytes, int]:
        """(status, at most `limit` + 1 bytes of the body, its announced length or 0)."""
        path = self._path(name)
        try:
            connection = self._pooled()
            if connection is not None:
                try:
                    return self._once(connection, method, path, body, limit)
                except (ConnectionError, http.client.BadStatusLine):
                    pass  # the server had closed it while it was idle: once more on a new one
            return self._once(self._connect(), method, path, body, limit)
        except TimeoutError as error:
            raise StoreError("timeout", str(error)) from error
        except http.client.RemoteDisconnected as error:
            raise StoreError("unreachable", str(error)) from error
        except OSError as error:
            raise StoreError("unreachable", str(error)) from error
        except (http.client.HTTPException, ValueError) as error:
            raise StoreError("garbage", f"{type(error).__name__}: {error}"[:300]) from error

    def _once(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, limit: int
    ) -> tuple[int, bytes, int]:
        reusable = False
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            data = response.read(limit + 1)
            length = response.headers.get("Content-Length", "")
            if method == "GET" and response.status == 200 and length.isdecimal() and len(data) < int(length) <= limit:
                raise StoreError("garbage", f"{len(data)} of {int(length)} bytes")
            if response.isclosed() and not response.will_close and len(self._idle) < _IDLE:
                self._idle.append(connection)
                reusable = True
            return response.status, data, int(length) if length.isdecimal() else 0
        finally:
            if not reusable:
                connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)

    def _pooled(self) -> http.client.HTTPConnection | None:
        if self._pid != os.getpid():  # a forked child must not talk on its parent's connections
            self._pid, self._idle = os.getpid(), deque()
        try:
            return self._idle.pop()
        except IndexError:
            return None


def _error(status: int) -> StoreError:
    return StoreError(_STATUS.get(status, "server-error" if status >= 500 else "garbage"), f"HTTP status {status}")
