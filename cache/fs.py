"""Any fsspec URL as a store: s3://, gs://, abfs://, sftp://, memory:// and whatever else fsspec knows."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from fused_eager.cache.extras import need
from fused_eager.cache.store import NAME, Stat, Store, StoreError, checked

# object stores: a PUT is atomic and folders do not exist; everywhere else bytes go to a temporary name first
_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"})
# where a file can be made only if there is none, in one step: by a request that says so (If-None-Match and its like),
# or by the system's own exclusive creation, for which fsspec's `pipe_file(mode="create")` looks first and writes then
_LOCAL = frozenset({"file", "local"})
_EXCLUSIVE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"}) | _LOCAL


class FsspecStore(Store):
    """`url` names a folder. `storage_options` go to fsspec as they are; so do its own configuration files and
    variables. The folder's lifetime rules evict: no list of uses is kept on shared storage."""

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float = 5.0,
        label: str = "fsspec",
    ) -> None:
        self.label = label
        self._url = url
        self._options = dict(storage_options or {})
        protocol = url.split("://", 1)[0]
        if protocol in ("s3", "s3a"):
            # botocore would retry for minutes
            limits = {"connect_timeout": timeout_s, "read_timeout": timeout_s, "retries": {"max_attempts": 1}}
            self._options["config_kwargs"] = {**limits, **self._options.get("config_kwargs", {})}
        self._core = need("fsspec.core")
        self._pid = 0
        self._fs: Any = None
        self._root = ""
        self._open()
        self._objects = bool(_OBJECTS & self._protocols)
        self._exclusive = bool(_EXCLUSIVE & self._protocols)
        self._is_local = bool(_LOCAL & self._protocols)

    def get(self, name: str, limit: int) -> bytes | None:
        path = self._path(name)
        with _coded():
            try:
                data = self._fs.cat_file(path, start=0, end=limit + 1)
            except FileNotFoundError:
                return None
            except Exception as error:
                # a range of an empty object is an error on S3 (416), whatever a library makes of it
                if "range" not in f"{type(error).__name__} {error}".lower():
                    raise
                self._fs.invalidate_cache()
                if self._fs.info(path).get("size") != 0:
                    raise
                return b""
        if len(data) > limit:
            raise StoreError("too-large", f"{name} has more than {limit} bytes")
        return bytes(data)

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with _coded():
            if self._objects:
                self._fs.pipe_file(path, data)
                return
            parent = path.rsplit("/", 1)[0]
            tmp = f"{self._root}/tmp/{secrets.token_hex(16)}"
            self._fs.makedirs(parent, exist_ok=True)
            self._fs.makedirs(f"{self._root}/tmp", exist_ok=True)
            try:
                self._fs.pipe_file(tmp, data)
                self._fs.mv(tmp, path)
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is the one to tell
                    self._fs.rm_file(tmp)
                raise

    def delete(self, name: str) -> None:
        path = self._path(name)
        with _coded(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def stat(self, name: str) -> Stat | None:
        path = self._path(name)
        with _coded():
            self._fs.invalidate_cache()
            try:
                return Stat(name, self._fs.info(path)["size"], 0.0)
            except FileNotFoundError:
                return None

    def list(self, kind: str) -> Iterator[Stat]:
        folder = f"{self._path('ac/' + '0' * 64).rsplit('/', 2)[0]}/{kind}"
        with _coded():
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(folder, detail=True)
            except FileNotFoundError:
                found = []
        pairs = ((f"{kind}/{item['name'].rsplit('/', 1)[-1]}", item["size"] or 0) for item in found)
        return (Stat(name, size, 0.0) for name, size in pairs if NAME.fullmatch(name))

    def swap(self, name: str, expect: bytes | None, data: bytes | None, ttl_s: float) -> bool:
        own = expect is not None and data is not None and data.startswith(expect[:32])
        if not self._exclusive or data is None or own:
            return super().swap(name, expect, data, ttl_s)
        path = self._path(name)
        if self.get(name, 4096) != expect:
            return False
        with _coded():
            if expect is not None:
                # taking over a dead lease takes two steps; two that do it at once may both believe to have it
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(path)
            if not self._objects:
                self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            try:
                if self._is_local:
                    with self._fs.open(path, "xb") as file:
                        file.write(data)
                else:
                    self._fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
        return True

    @property
    def _protocols(self) -> set[str]:
        protocol = self._fs.protocol
        return {protocol} if isinstance(protocol, str) else set(protocol)

    def _path(self, name: str) -> str:
        if self._pid != os.getpid():  # event loops and connections do not survive a fork
            self._open()
        return f"{self._root}/{checked(name)}"

    def _open(self) -> None:
        try:
            self._fs, root = self._core.url_to_fs(self._url, skip_instance_cache=True, **self._options)
        except ImportError as error:
            kind = self._url.split("://")[0]
            raise ImportError(f"{kind}:// stores need another package beside fsspec: {error}") from error
        self._root = root.rstrip("/")
        self._pid = os.getpid()


@contextlib.contextmanager
def _coded() -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except TimeoutError as error:
        raise StoreError("timeout", str(error)) from error
    except PermissionError as error:
        raise StoreError("denied", str(error)) from error
    except ConnectionError as error:
        raise StoreError("unreachable", str(error)) from error
    except Exception as error:  # every backend brings exceptions of its own
        kind = type(error).__name__
        code = next((code for part, code in _BY_NAME if part in kind), "io")
        raise StoreError(code, f"{kind}: {error}"[:300]) from error


_BY_NAME = (  # parts of the names of botocore's, aiohttp's and google's exceptions
    ("Timeout", "timeout"),
    ("Credential", "denied"),
    ("Forbidden", "denied"),
    ("Connect", "unreachable"),
    ("Endpoint", "unreachable"),
)
