"""Single flight: of many processes and hosts that miss the same key, one makes the entry, the others follow.

A lease is a record in a store, under `lease/<key>`, that its holder changes at every heartbeat. Nobody compares
clocks: a follower takes a lease for dead when it has itself seen the same record for the lease's time to live. So a
holder that was killed delays nobody for longer than that, and a wrong clock delays nobody at all. On the holder's own
host the system is asked as well: one that is dead delays nobody, and one that is stopped for a second.

Leases only save work. Two holders, a lost lease or a store that is down cost a second compilation and nothing else.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fused_eager.cache import alive
from fused_eager.cache.forks import call_after_fork
from fused_eager.cache.key import Key
from fused_eager.cache.read import Entry, Miss
from fused_eager.cache.store import StoreError
from fused_eager.cache.tier import Tier

WAITS = {
    "lease-free": "the other process is gone or gave up; ask for the flight again",
    "wait-timeout": "the other process is still at it",
    "given-up": "the caller wants it no more, or does not want to wait for it",
}
STOPPED_S = 1.0  # seconds for which a holder has to be seen stopped: a profiler stops one for a moment
MAX_TTL_S = 60.0  # whatever a record claims: an unauthenticated one must not stop a fleet
_RECORD = re.compile(rb"([0-9a-f]{32}) ([0-9]{1,9}) ([0-9]{1,9}) ([ -~]{0,200})")
_RECORD_BYTES = 4096


class Lead:
    """The right and duty to make an entry, kept alive by heartbeats until `release`. A context manager.

    `tier` is the label of the store that holds the lease; "" when none could, which hinders nobody.
    """

    def __init__(self, key: Key, leases: Leases | None, tier: str) -> None:
        self.key = key
        self.tier = tier
        self._leases = leases
        self._handed_over = False

    def hand_over(self) -> None:
        """Leaves the release to somebody else: `with` no longer does it. `Cache.publish` calls this."""
        self._handed_over = True

    @property
    def held(self) -> bool:
        """False after release, and when another process took the lease over because heartbeats failed."""
        return self._leases is not None and self._leases.holds(self)

    def release(self) -> None:
        """Lets followers go on. Again is fine. Never raises."""
        leases, self._leases = self._leases, None
        if leases is not None:
            leases.release(self)

    def __enter__(self) -> Lead:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._handed_over:
            self.release()


@dataclass(frozen=True)
class Held:
    """Another process holds the lease in this tier; `owner` is what it says of itself."""

    tier: str
    owner: str


class Follow:
    """Another process makes the entry, which `peek` finds as soon as it is there."""

    def __init__(self, peek: Callable[[Key], Entry | Miss], leases: Leases, key: Key, entry: Entry | None) -> None:
        self.key = key
        self._peek = peek
        self._leases = leases
        self._entry = entry

    def wait(self, timeout_s: float, given_up: Callable[[], bool] = lambda: False) -> Entry | Miss:
        """The entry as soon as it is there; else a Miss whose reason is a row of WAITS. `given_up` is asked again and
        again, twice a second at least: a wait that it ends takes no longer."""
        began = time.monotonic()
        pause = 0.01
        while True:
            result = self._entry or self._peek(self.key)
            if isinstance(result, Entry):
                return result
            waited = time.monotonic() - began
            # a lease that ended between the two looks may have left an entry: believe only a look that comes after
            if self._leases.is_free(self.key):
                result = self._peek(self.key)
                return result if isinstance(result, Entry) else Miss(self.key, "lease-free", result.tiers, waited)
            if waited >= timeout_s:
                return Miss(self.key, "wait-timeout", result.tiers, waited)
            if given_up():
                return Miss(self.key, "given-up", result.tiers, waited)
            time.sleep(min(pause, max(0.0, timeout_s - waited)))
            pause = min(pause * 1.5, 0.5)


@dataclass
class _Seen:
    """A record of somebody's, since when it has been that one, and its holder been seen stopped."""

    record: bytes
    since: float
    stopped_since: float | None = None


@dataclass
class _Holding:
    tier: Tier
    name: str
    record: bytes
    last_beat: float


class Leases:
    """The leases of one process over the tiers that it may write to; the slowest of them, shared by most, comes first.
    When its store is down the next one holds the lease, so that at least the processes of one host share work."""

    def __init__(self, tiers: Sequence[Tier], ttl_s: float, count: Callable[[str, str], None]) -> None:
        self.tiers = tuple(reversed(tiers))
        self.ttl_s = min(ttl_s, MAX_TTL_S)
        self._count = count
        self._heart: threading.Thread | None = None
        self._reset()
        call_after_fork(self._reset)

    def take(self, key: Key) -> Lead | Held:
        """The lease, or who has it. Never waits for a holder, never raises."""
        name = f"lease/{key.digest}"
        token = secrets.token_hex(16)
        record = self._record(token, 0)
        for tier in self.tiers:
            try:
                current = self._get(tier, name)
                if current is not None and not self._is_stale(tier, name, current):
                    self._count(tier.label, "follows")
                    return Held(tier.label, _owner(current))
                if not self._swap(tier, name, current, record):
                    self._count(tier.label, "follows")
                    return Held(tier.label, "")
            except StoreError as error:
                self._count(tier.label, f"lease-failed:{error.code}")
                continue
            self._count(tier.label, "leads" if current is None else "takeovers")
            lead = Lead(key, self, tier.label)
            with self._changed:
                self._held[lead] = _Holding(tier, name, record, time.monotonic())
                self._start_heart()
            return lead
        return Lead(key, None, "")

    def is_free(self, key: Key) -> bool:
        """True when no tier shows a live lease: absent, stale, or its store is down."""
        name = f"lease/{key.digest}"
        for tier in self.tiers:
            try:
                current = self._get(tier, name)
            except StoreError as error:
                self._count(tier.label, f"lease-failed:{error.code}")
                continue
            if current is not None and not self._is_stale(tier, name, current):
                return False
        return True

    def holds(self, lead: Lead) -> bool:
        with self._changed:
            return lead in self._held

    def release(self, lead: Lead) -> None:
        with self._changed:
            holding = self._held.pop(lead, None)
        if holding is not None:
            self._drop(holding)

    def release_all(self) -> None:
        with self._changed:
            held = list(self._held)
        for lead in held:
            lead.release()

    def _get(self, tier: Tier, name: str) -> bytes | None:
        # an empty record is a released one, for stores that cannot delete
        return tier.guard.call(lambda: tier.store.get(name, _RECORD_BYTES), tier.timeout_s) or None

    def _swap(self, tier: Tier, name: str, expect: bytes | None, data: bytes | None) -> bool:
        return tier.guard.call(
            lambda: tier.store.swap(name, expect, data, self.ttl_s), tier.timeout_s, background=data is None
        )

    def _record(self, token: str, beat: int) -> bytes:
        return f"{token} {beat} {int(self.ttl_s * 1000)} {self._owner}".encode()

    def _is_stale(self, tier: Tier, name: str, current: bytes) -> bool:
        found = _RECORD.fullmatch(current)
        ttl_s = min(int(found[3]) / 1000, MAX_TTL_S) if found else self.ttl_s
        now = time.monotonic()
        with self._changed:
            seen = self._seen.get((tier.label, name))
            if seen is None or seen.record != current:
                if len(self._seen) > 10_000:
                    self._seen.clear()  # costs at most one more time to live each
                seen = self._seen[tier.label, name] = _Seen(current, now)
            elif now - seen.since >= ttl_s:
                return True
            state = alive.state_of(found[4].decode().partition(" ")[2]) if found else alive.UNKNOWN
            if state != alive.STOPPED:
                seen.stopped_since = None
                return state == alive.DEAD
            if seen.stopped_since is None:
                seen.stopped_since = now
            return now - seen.stopped_since >= min(STOPPED_S, ttl_s)

    def _start_heart(self) -> None:
        if self._heart is None or not self._heart.is_alive():
            heart = threading.Thread(target=self._beat, name="fused-eager-lease", daemon=True)
            try:
                heart.start()
            except RuntimeError:  # shutting down: the lease simply expires
                return
            self._heart = heart

    def _beat(self) -> None:
        while True:
            time.sleep(self.ttl_s / 3)
            with self._changed:
                if not self._held:
                    self._heart = None
                    return
                held = list(self._held.items())
            for lead, holding in held:
                self._beat_one(lead, holding)

    def _beat_one(self, lead: Lead, holding: _Holding) -> None:
        token, beat, *_ = holding.record.split(b" ")
        record = self._record(token.decode(), int(beat) + 1)
        try:
            kept = self._swap(holding.tier, holding.name, holding.record, record)
            if not kept:
                # an earlier beat may have arrived although its answer did not
                record = self._get(holding.tier, holding.name) or b""
                kept = record.startswith(token)
            holding.last_beat = time.monotonic()
        except StoreError as error:
            self._count(holding.tier.label, f"lease-failed:{error.code}")
            kept, record = time.monotonic() - holding.last_beat < self.ttl_s, holding.record
        with self._changed:
            released = lead not in self._held
            if not released and kept:
                holding.record = record
            elif not released:
                del self._held[lead]
                self._count(holding.tier.label, "leases-lost")
        if released:
            self._drop(holding)  # the beat came after the release and brought the record back

    def _drop(self, holding: _Holding) -> None:
        token = holding.record[:32]
        try:
            for _ in range(3):  # a heartbeat may come between the look and the removal
                current = self._get(holding.tier, holding.name)
                if current is None or not current.startswith(token):
                    return
                if self._swap(holding.tier, holding.name, current, None):
                    return
        except StoreError as error:
            self._count(holding.tier.label, f"lease-failed:{error.code}")  # it expires by itself

    def _reset(self) -> None:
        # a forked child holds none of its parent's leases
        self._changed = threading.Lock()
        self._held: dict[Lead, _Holding] = {}
        self._seen: dict[tuple[str, str], _Seen] = {}
        host = re.sub(r"[^!-~]", "?", f"{socket.gethostname()}:{os.getpid()}")[:100]
        self._owner = f"{host} {alive.mark()}".rstrip()
        self._heart = None


def _owner(record: bytes) -> str:
    found = _RECORD.fullmatch(record)
    return found[4].decode().partition(" ")[0] if found else ""
