"""A Redis server as a store: one string per name, leases by an atomic script. Eviction is the server's `maxmemory`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fused_eager.cache.extras import need
from fused_eager.cache.store import NAME, Stat, Store, StoreError, checked

# compare and set in one step; an expired record is an absent one
_SWAP = """
local current = redis.call('GET', KEYS[1])
if ARGV[1] == 'absent' then
  if current then return 0 end
elseif current ~= ARGV[2] then
  return 0
end
if ARGV[3] == 'delete' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5])
end
return 1
"""


class RedisStore(Store):
    """`url` as redis-py reads it: redis://[user:password@]host:port/db, rediss://, unix://. Names get `prefix`."""

    def __init__(self, url: str, *, prefix: str = "fused-eager/", timeout_s: float = 5.0, label: str = "redis") -> None:
        self.label = label
        self._prefix = prefix
        self._redis = need("redis")
        # one retry: a pooled connection may have died with a restarted server
        retry = need("redis.retry").Retry(need("redis.backoff").NoBackoff(), 1)
        self._client = self._redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=retry, protocol=2
        )

    def get(self, name: str, limit: int) -> bytes | None:
        key = self._key(name)
        with self._coded():
            # a range, so that nobody can make us read more than we asked for; it cannot tell absent from empty
            pipe = self._client.pipeline(transaction=True)
            exists, data = pipe.exists(key).getrange(key, 0, limit).execute()
            if not exists:
                return None
            if not isinstance(data, bytes):
                raise StoreError("garbage", f"{type(data).__name__} instead of bytes")
        if len(data) > limit:
            raise StoreError("too-large", f"{name} has more than {limit} bytes")
        return data

    def put(self, name: str, data: bytes) -> None:
        key = self._key(name)
        with self._coded():
            self._client.set(key, data)

    def delete(self, name: str) -> None:
        key = self._key(name)
        with self._coded():
            self._client.delete(key)

    def stat(self, name: str) -> Stat | None:
        key = self._key(name)
        with self._coded():
            pipe = self._client.pipeline(transaction=True)
            exists, size = pipe.exists(key).strlen(key).execute()
        return Stat(name, size, 0.0) if exists else None

    def list(self, kind: str) -> Iterator[Stat]:
        with self._coded():
            keys = self._client.scan_iter(match=f"{self._prefix}{kind}/*", count=1000)
            names = [key.decode(errors="replace")[len(self._prefix) :] for key in keys]
        return (stat for name in names if NAME.fullmatch(name) and (stat := self.stat(name)) is not None)

    def swap(self, name: str, expect: bytes | None, data: bytes | None, ttl_s: float) -> bool:
        arguments = (
            "absent" if expect is None else "equal", expect or b"",
            "delete" if data is None else "set", data or b"", max(1, int(ttl_s * 1000)),
        )  # fmt: skip
        key = self._key(name)
        with self._coded():
            return bool(self._client.eval(_SWAP, 1, key, *arguments) == 1)

    def close(self) -> None:
        with self._coded():
            self._client.close()

    def _key(self, name: str) -> str:
        return self._prefix + checked(name)

    @contextlib.contextmanager
    def _coded(self) -> Iterator[None]:
        errors: Any = self._redis.exceptions
        try:
            yield
        except StoreError:
            raise
        except (errors.TimeoutError, TimeoutError) as error:
            raise StoreError("timeout", str(error)) from error
        except (errors.AuthenticationError, errors.NoPermissionError, errors.AuthorizationError) as error:
            raise StoreError("denied", str(error)) from error
        except errors.ReadOnlyError as error:
            raise StoreError("read-only", str(error)) from error
        except errors.OutOfMemoryError as error:
            raise StoreError("full", str(error)) from error
        except (errors.ConnectionError, OSError) as error:
            raise StoreError("unreachable", str(error)) from error
        except errors.ResponseError as error:
            raise StoreError("server-error", str(error)) from error
        except Exception as error:  # the parser met something that is no Redis answer
            raise StoreError("garbage", f"{type(error).__name__}: {error}"[:300]) from error
