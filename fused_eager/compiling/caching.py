"""The compile cache as the runtime uses it: opened from the options, asked before compiling, told afterwards.

Whatever is wrong with a cache, its stores or its entries costs a compilation and is told in the event log; nothing of
it is raised into the program. Only an option that cannot be right is, where the context is entered.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fused_eager import cache as store
from fused_eager.cache import Cache, Entry, Key, Lead, LocalStore, Unencodable
from fused_eager.cache.background import Writer
from fused_eager.cache.store import CODES
from fused_eager.cache.url import redacted
from fused_eager.fusion_rules.lowering import EXCEPTIONS

from ..bounded import Bounded
from ..config import OPTIONS, Config, OptionError
from ..devices.device import Device
from ..devices.host.device import HOST
from ..log.events import LOG
from ..lowering.failed import NodeFailed
from ..planning.room import wanted
from ..policy.segment import Choice
from ..progress import is_in_vain, waiting
from . import background, canonical, emit, surroundings
from .compile import Settings
from .executable import Executable, Failure, Made, Unloadable, failure_blobs, from_blobs, to_blobs
from .key import Computation

_ROWS = tuple(name for name in OPTIONS if name.startswith("cache"))


@dataclass
class _Following:
    """One look-up of an entry: who makes it meanwhile, if another process does."""

    owner: object = None


class _Followed(threading.local):
    def __init__(self) -> None:
        self.now = _Following()


class Keeper:
    """An open cache with the options it was opened with."""

    def __init__(self, config: Config):
        self.salt = config.cache_salt
        self.wait = config.cache_wait
        # By digest and device: calls that memory forgot come again.
        self.loaded: Bounded[tuple[str, str], Executable] = Bounded(4096)
        self.choices: Bounded[str, Choice] = Bounded(4096)  # what the stores hold, as far as it has been seen
        self._followed = _Followed()
        self._is_unusable = False  # this host's folder, as has been told
        self.cache: Cache = store.open_cache(
            config.cache,
            local_dir=config.cache_dir or None,
            local_bytes=config.cache_bytes,
            memory_bytes=0,  # loaded executables are kept, which is better than their bytes
            keys=_keys(config.cache_keys),
            allow_unsigned=config.cache_unsigned,
            timeout_s=config.cache_timeout,
            lease_ttl_s=config.cache_lease,
            on_event=self._tell,
        )
        # After the cache's own, so that at exit this one is flushed first: it feeds the other.
        self._writer = Writer()

    def describe_here(self) -> None:
        """Tell the cache which machine this is. Not when it is opened: looking at the device starts XLA."""
        if self.cache.origin is None:
            self.cache.versions = surroundings.versions()
            self.cache.origin = surroundings.origin()
            self.cache.origin_of = surroundings.origin_of

    def key(self, computation: Computation, bounds: bool, device: Device = HOST) -> Key:
        """The key of a region here and now. Raises Unencodable."""
        self.describe_here()
        return Key({"region": canonical.to_parts(computation), **surroundings.parts(bounds, self.salt, device)})

    def load_or_make(
        self,
        computation: Computation,
        bounds: bool,
        progress: bool,
        make: Callable[[], Made],
        device: Device = HOST,
    ) -> Executable:
        """The executable of a region from the cache; else what `make` compiles, which is kept for the next one.

        Raises:
            NodeFailed: as `make` does, or did when another process tried.
        """
        name = computation.name
        try:
            key = self.key(computation, bounds, device)
        except Unencodable as why:
            LOG.emit("cache-refused", region=name, detail=str(why))
            return make().executable
        at = key.digest, device.name  # the entry is the same for all devices of a kind
        known = self.loaded.get(at)
        if known is not None:
            return known
        emit.looked_for(name, key)
        found = self._fetch(key, name, progress)
        if isinstance(found, Entry):
            loaded = self._load(found, computation, name, device)
            if loaded is not None:
                self.loaded[at] = loaded = replace(loaded, key=key.digest)
                return loaded
        lead = found if isinstance(found, Lead) else None
        try:
            made = make()
        except NodeFailed as failed:
            if failed.lasting:
                failure = Failure(computation.region.nodes.index(failed.index), failed.reason)
                self._publish(key, name, lambda: failure_blobs(failure), 0.0, lead)
            elif lead is not None:
                lead.release()
            raise
        except BaseException:
            if lead is not None:
                lead.release()
            raise
        executable = replace(made.executable, key=key.digest, code=None)  # it is in the cache
        self.loaded[at] = executable
        portable = made.portable  # and nothing else of what was made: it is large, and waits for the stores
        self._publish(key, name, lambda: to_blobs(portable, executable), executable.seconds, lead)
        return executable

    def later(self, job: Callable[[], None]) -> bool:
        """Do something with the stores on a thread that nobody waits for; False at the interpreter's end.

        `job` handles its own errors.
        """
        return self._writer.submit(0, job)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything that was compiled so far has been written; False if that took longer."""
        began = time.monotonic()
        done = self._writer.flush(timeout_s)
        return self.cache.flush(max(0.0, timeout_s - (time.monotonic() - began))) and done

    def _fetch(self, key: Key, name: str, progress: bool) -> Entry | Lead | None:
        """An entry to load, the right to make one, or None: make one without being asked to."""
        following = self._followed.now = _Following()
        began = time.perf_counter()

        def what() -> str:
            if following.owner is None:
                return f"looking {name} up in the compile cache"
            return f"waiting for what another process makes of {name}"

        with waiting(what, progress):
            # At its end a program compiles nothing, and where a rank is lost the others have an error to raise.
            found = self.cache.fetch(key, self.wait, lambda: background.is_closing() or is_in_vain())
        if following.owner is not None:
            seconds = time.perf_counter() - began
            came = "entry" if isinstance(found, Entry) else "lead" if isinstance(found, Lead) else found.reason
            LOG.emit(
                "cache-wait", region=name, key=key.digest, seconds=seconds, owner=following.owner, outcome=came
            )
        return found if isinstance(found, (Entry, Lead)) else None

    def _load(self, entry: Entry, computation: Computation, name: str, device: Device) -> Executable | None:
        began, region, homes = time.perf_counter(), computation.region, computation.homes
        try:
            scratch = wanted(region, homes, device)
            outputs, takes = [homes[v] for v in region.outputs], computation.taken(scratch)
            loaded = from_blobs(entry.blobs, outputs, name, device, scratch, takes)
        except Unloadable as why:
            LOG.emit("cache-unloadable", region=name, key=entry.key.digest, tier=entry.tier, detail=str(why))
            return None
        seconds = time.perf_counter() - began
        if isinstance(loaded, Executable):
            if all(0 <= c.node < len(region.nodes) and c.error in EXCEPTIONS for c in loaded.checks):
                LOG.emit(
                    "cache-load",
                    region=name,
                    key=entry.key.digest,
                    tier=entry.tier,
                    ops=len(region.nodes),
                    seconds=seconds,
                    saved=loaded.seconds,
                )
                return loaded
        elif 0 <= loaded.node < len(region.nodes):
            raise NodeFailed(region.nodes[loaded.node], loaded.reason, lasting=True)
        LOG.emit("cache-unloadable", region=name, key=entry.key.digest, tier=entry.tier, detail="no such node")
        return None

    def _publish(
        self, key: Key, name: str, blobs: Callable[[], dict[str, bytes]], seconds: float, lead: Lead | None
    ) -> None:
        def job() -> None:
            with lead or nullcontext():
                try:
                    made = blobs()
                except Exception as why:  # NotPortable, or what JAX raises while it writes itself down
                    LOG.emit("cache-refused", region=name, detail=str(why) or type(why).__name__)
                else:
                    self.cache.publish(key, made, metadata={"seconds": seconds}, lead=lead)

        if not self.later(job):
            job()  # at the interpreter's end there is no other thread any more

    def _tell(self, kind: str, data: Mapping[str, Any]) -> None:
        if kind == "follow":
            self._followed.now.owner = data["owner"]
        plain = {name: _plain(value) for name, value in data.items()}
        LOG.emit(f"cache-{kind}", **plain)
        if kind == "write-failed":
            self._tell_obstacle(data["tier"])
        elif kind == "miss":
            for miss in data["tiers"]:
                if miss.code in CODES:
                    self._tell_obstacle(miss.tier)

    def _tell_obstacle(self, label: str) -> None:
        """Tell once, with the cause, that this host's folder is of no use. One entry may fail alone, and what the third
        failure says is that nobody asks any more: so the store is asked, where one has failed."""
        tier = next(tier for tier in self.cache.tiers if tier.label == label)
        if self._is_unusable or tier.shared or not isinstance(tier.store, LocalStore):
            return
        why = tier.store.obstacle()
        if why is not None:
            self._is_unusable = True
            LOG.emit("cache-unusable", folder=str(tier.store.root), code=why.code, detail=str(why))


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _keys(where: str) -> bytes:
    """The key text that the option `cache_keys` points to. Raises OSError."""
    if not where:
        return b""
    if where.startswith("env:"):
        if where[4:] not in os.environ:
            raise OSError(f"the environment has no {where[4:]}")
        return os.environ[where[4:]].encode()
    return Path(where).expanduser().read_bytes()


_KEEPERS: dict[tuple[Any, ...], Keeper | None] = {}
_LOCK = threading.Lock()


def settings(config: Config, device: Device = HOST) -> Settings:
    """How regions are compiled with these options, on the thread that asks.

    Raises:
        OptionError: as `keeper`.
    """
    # A wait in the background is nobody's, and told to nobody.
    progress = config.progress and not background.is_own_thread()
    return Settings(config.check_bounds, progress, keeper(config), config.in_subprocess, device)


def keeper(config: Config) -> Keeper | None:
    """The cache that the options name, opened once per process; None where it is off. Connects to nothing yet.

    Raises:
        OptionError: a store or keys that cannot be what was meant.
    """
    rows = tuple([getattr(config, name) for name in _ROWS])
    try:
        return _KEEPERS[rows]
    except KeyError:
        pass
    with _LOCK:
        if rows not in _KEEPERS:
            _KEEPERS[rows] = found = None if config.cache.strip() == "off" else _open(config)
            if found is not None:
                background.keep()
        return _KEEPERS[rows]


def forget_loaded() -> None:
    """Keep no executable in memory; what the stores hold stays there."""
    for each in list(_KEEPERS.values()):
        if each is not None:
            each.loaded.clear()


def _open(config: Config) -> Keeper | None:
    try:
        return Keeper(config)
    except RuntimeError as why:
        LOG.emit("cache-off", detail=str(why))  # a user without a home
        return None
    except OSError as error:
        if config.cache_keys:
            raise OptionError(f"option 'cache_keys' is {config.cache_keys!r}, which cannot be read: {error}") from error
        raise OptionError(f"option 'cache' is {_shown(config)!r}, which cannot be opened: {error}") from error
    except store.KeyTextError as error:
        raise OptionError(f"option 'cache_keys' is {config.cache_keys!r}, and in it {error}") from error
    except (ValueError, ImportError, store.MissingExtra) as error:
        raise OptionError(
            f"option 'cache' is {_shown(config)!r}: {error}; allowed: off, or URLs and absolute paths with commas"
        ) from error


def _shown(config: Config) -> str:
    return ",".join(redacted(url.strip()) for url in config.cache.split(","))
