"""A directory as a store: the local tier, and a shared one when the directory is on NFS or the like.

ac/<hex>  cas/<hex>   as everywhere, so that a web server can serve the directory as it is
lease/<hex>           leases, under lease/.lock
tmp/                  files being written; renamed into place, so no reader ever sees half a file
quarantine/           damaged files, the last few, for a look
.lock                 its flock guards the accounting; its content is an upper bound of the bytes in use
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fused_eager.cache.store import NAME, Stat, Store, StoreError, checked

_ERRNO = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EFBIG: "full",
    errno.EROFS: "read-only",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
}
_FOLDERS = ("ac", "cas", "lease", "quarantine", "tmp")
_KEEP_QUARANTINED = 32
_DEAD_TMP_S = 3600.0  # no write takes an hour: its writer was killed
_DEAD_LEASE_S = 86400.0
_LOW_WATER = 0.9  # evict down to this, or every write at the bound would scan the directory
_LOCK_BYTES = 32


def default_root() -> Path:
    """$XDG_CACHE_HOME/fused_eager, else ~/.cache/fused_eager."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG rules: a relative path is to be ignored
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "fused_eager"


def is_private(found: os.stat_result) -> bool:
    """Whether what was found is this user's, and nobody else can write to it."""
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


class LocalStore(Store):
    """A bounded directory, safe with many processes that come, go and are killed.

    `private` (the default) creates it 0700 and refuses one that another user owns or can write to: what is in it is
    trusted without signatures. A shared one takes the umask's permissions. `max_bytes` bounds ac, cas and quarantine
    together at all times (files still being written come on top); the least recently used go first. `fsync` makes
    writes survive a power cut; without it a cut can only cost entries, since digests find the damage.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int = 8 << 30,
        private: bool = True,
        fsync: bool = False,
        lock_wait_s: float = 2.0,
        label: str = "local",
    ) -> None:
        self.root = Path(root) if root is not None else default_root()
        self.max_bytes = max_bytes
        self.private = private
        self.fsync = fsync
        self.lock_wait_s = lock_wait_s
        self.label = label
        self._checked = False

    def get(self, name: str, limit: int) -> bytes | None:
        path = self._path(name)
        with _coded():
            self._check()
            try:
                # no symbolic links, and no waiting on a FIFO that somebody put there
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    raise StoreError("io", f"{path} is not a file")
                if found.st_size > limit:
                    raise StoreError("too-large", f"{path} has {found.st_size} bytes")
                data = _read(fd, limit)
                # on a read-only disk the order of use is not kept, and nothing is evicted there either
                with contextlib.suppress(OSError):
                    os.utime(fd)
                return data
            finally:
                os.close(fd)

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        if len(data) > self.max_bytes:
            raise StoreError("full", f"{len(data)} bytes do not fit into a bound of {self.max_bytes}")
        with _coded():
            tmp = self._write_tmp(data)
            try:
                if name.startswith("ac/"):
                    # look used before our blobs, so that a manifest is evicted before what it points to
                    now = os.stat(tmp).st_mtime
                    os.utime(tmp, (now - 60, now - 60))
                with self._lock(self.root / ".lock") as lock:
                    self._account(lock, path, len(data))
                    os.replace(tmp, path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(tmp)
                raise
            if self.fsync:
                _fsync_dir(path.parent)

    def delete(self, name: str) -> None:
        # the account keeps counting it until the next scan: too high is safe, too low is not
        with _coded(), contextlib.suppress(FileNotFoundError):
            self._check()
            os.unlink(self._path(name))

    def stat(self, name: str) -> Stat | None:
        with _coded():
            self._check()
            try:
                found = os.lstat(self._path(name))
            except FileNotFoundError:
                return None
        return Stat(name, found.st_size, max(found.st_atime, found.st_mtime))

    def list(self, kind: str) -> Iterator[Stat]:
        with _coded():
            self._check()
            found = [Stat(f"{kind}/{item.name}", size, used) for item, size, used in _scan(self.root / kind)]
        return (item for item in found if NAME.fullmatch(item.name))

    def quarantine(self, name: str, why: str) -> None:
        path = self._path(name)
        with _coded():
            self._make_dirs()
            slug = re.sub(r"[^a-z0-9]+", "-", why.lower())[:40]
            target = self.root / "quarantine" / f"{name.replace('/', '-')}.{time.time_ns()}.{slug}"
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.rename(path, target)
            old = sorted(_scan(self.root / "quarantine"), key=lambda entry: entry[2], reverse=True)
            for item, _, _ in old[_KEEP_QUARANTINED:]:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(item.path)

    def swap(self, name: str, expect: bytes | None, data: bytes | None, ttl_s: float) -> bool:
        path = self._path(name)
        with _coded():
            self._make_dirs()
            with self._lock(self.root / "lease" / ".lock"):
                try:
                    current: bytes | None = path.read_bytes()
                except FileNotFoundError:
                    current = None
                if current != expect:
                    return False
                if data is None:
                    path.unlink(missing_ok=True)
                else:
                    os.replace(self._write_tmp(data), path)
                return True

    def usage(self) -> int:
        """Bytes in ac, cas and quarantine now, by looking."""
        with _coded():
            return sum(size for kind in ("ac", "cas", "quarantine") for _, size, _ in _scan(self.root / kind))

    def gc(self, max_bytes: int | None = None) -> int:
        """Evicts down to `max_bytes` (default: this store's bound) and returns the bytes that remain."""
        with _coded():
            self._make_dirs()
            with self._lock(self.root / ".lock") as lock:
                used = self._evict(lock, self.max_bytes if max_bytes is None else max_bytes)
                _write_count(lock, used)
                return used

    def obstacle(self) -> StoreError | None:
        """Why nothing can be kept here, or None. Found out by trying, for permissions do not tell all of it (/proc, a
        full disk); what was not there is not there afterwards."""
        self._checked = False
        try:
            with _coded():
                there = {_nearest(self.root / folder) for folder in _FOLDERS}
                for path in there:
                    if not path.is_dir():
                        raise StoreError("io", f"{path} is not a folder")
                self._check()
                for path in there:
                    try:
                        os.rmdir(tempfile.mkdtemp(prefix="probe-", dir=path))
                    except OSError as error:
                        code = _ERRNO.get(error.errno or 0, "io")
                        raise StoreError(code, f"{path} cannot be written to: {error.strerror}") from error
        except StoreError as error:
            return error
        return None

    def _account(self, lock: int, path: Path, size: int) -> None:
        # under the lock and before the rename: whoever looks at the directory never sees more than the bound
        used = _read_count(lock)
        try:
            old = os.lstat(path).st_size
        except FileNotFoundError:
            old = 0
        if used is None or used + size > self.max_bytes:
            room = self.max_bytes - size
            used = self._evict(lock, room if used is None else min(room, int(self.max_bytes * _LOW_WATER)))
            # what is replaced may have been evicted just now; counting it twice is on the safe side
            old = 0
        _write_count(lock, used + size - old)

    def _evict(self, lock: int, room: int) -> int:
        """Deletes, least recently used first, until at most `room` bytes are left; returns what is left."""
        os.utime(lock)
        now = os.fstat(lock).st_mtime  # the file server's clock, which need not be ours
        for folder, age in (("tmp", _DEAD_TMP_S), ("lease", _DEAD_LEASE_S)):
            for item, _, _ in _scan(self.root / folder):
                with contextlib.suppress(FileNotFoundError):
                    if now - item.stat(follow_symlinks=False).st_mtime > age and item.name != ".lock":
                        os.unlink(item.path)
        found = [(0.0, size, item) for item, size, _ in _scan(self.root / "quarantine")]
        found += [(used, size, item) for kind in ("ac", "cas") for item, size, used in _scan(self.root / kind)]
        left = sum(size for _, size, _ in found)
        for _, size, item in sorted(found, key=lambda entry: entry[0]):
            if left <= room:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(item.path)
            left -= size
        return left

    def _path(self, name: str) -> Path:
        return self.root / checked(name)

    def _write_tmp(self, data: bytes) -> Path:
        self._make_dirs()
        tmp = self.root / "tmp" / f"{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(tmp, flags, 0o600 if self.private else 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if self.fsync:
                os.fsync(fd)
        except BaseException:
            os.unlink(tmp)
            raise
        finally:
            os.close(fd)
        return tmp

    def _make_dirs(self) -> None:
        self._check()
        for folder in _FOLDERS:
            path = self.root / folder
            if not path.is_dir():
                self.root.mkdir(mode=0o700 if self.private else 0o777, parents=True, exist_ok=True)
                path.mkdir(mode=0o700 if self.private else 0o777, exist_ok=True)
                self._check()

    def _check(self) -> None:
        if self._checked or not self.private:
            return
        try:
            found = os.stat(self.root)
        except FileNotFoundError:
            return
        if not is_private(found):
            raise StoreError("unsafe-directory", f"{self.root} must be yours and writable by nobody else")
        self._checked = True

    @contextlib.contextmanager
    def _lock(self, path: Path) -> Iterator[int]:
        # flock, not a lock file: the kernel opens it when its holder is killed. Polled, as a stopped holder must not
        # stop us with it.
        mode = 0o600 if self.private else 0o666
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            deadline = time.monotonic() + self.lock_wait_s
            pause = 0.0002
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except (BlockingIOError, InterruptedError):
                    if time.monotonic() > deadline:
                        raise StoreError("busy", f"{path} is held by another process") from None
                    time.sleep(pause * (0.5 + secrets.randbelow(256) / 256))
                    pause = min(pause * 1.5, 0.01)
            yield fd
        finally:
            os.close(fd)  # closing releases the lock


@contextlib.contextmanager
def _coded() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(_ERRNO.get(error.errno or 0, "io"), str(error)) from error


def _nearest(path: Path) -> Path:
    """`path`, or the first of the folders above it that there is. A link that leads nowhere is there."""
    return next((there for there in (path, *path.parents) if os.path.lexists(there)), Path("."))


def _read(fd: int, limit: int) -> bytes:
    pieces = []
    left = limit + 1
    while left > 0 and (piece := os.read(fd, min(left, 1 << 24))):
        pieces.append(piece)
        left -= len(piece)
    if left <= 0:
        raise StoreError("too-large", "the file grew while it was read")
    return b"".join(pieces)


def _read_count(lock: int) -> int | None:
    text = os.pread(lock, _LOCK_BYTES, 0)
    # anything but our own spelling (an empty new file, a torn write) means: count again
    return int(text) if re.fullmatch(rb"[0-9]{20}\n", text) else None


def _write_count(lock: int, used: int) -> None:
    os.pwrite(lock, b"%020d\n" % max(0, used), 0)


def _scan(folder: Path) -> Iterator[tuple[os.DirEntry[str], int, float]]:
    """(entry, size, last use) of every file in a folder; files that vanish meanwhile are left out."""
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for item in entries:
            with contextlib.suppress(FileNotFoundError):
                found = item.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    yield item, found.st_size, found.st_atime
    return


def _fsync_dir(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
