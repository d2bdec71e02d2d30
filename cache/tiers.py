"""The cache: tiers of stores, read from the fastest down, written to all.

No method raises into the program for anything that stores, networks or other writers do: a refusal is a value
(Miss, Published.refused) with a code, and every code is counted per tier.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .background import Writer
from .encode import Unencodable, freeze
from .forks import call_after_fork
from .key import Key
from .lease import Follow, Lead, Leases
from .manifest import Blob, Manifest, ManifestError, Origin, parse
from .pack import pack
from .read import DAMAGE, Entry, Found, Miss, Policy, Refused, TierMiss, read_entry
from .sign import Keyring
from .store import StoreError
from .tier import Tier

Observer = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Published:
    """What became of a publication: tiers written, tiers queued for the background, and refusals with their codes."""

    manifest: Manifest | None
    written: tuple[str, ...] = ()
    queued: tuple[str, ...] = ()
    refused: tuple[TierMiss, ...] = ()


class Cache:
    """See the module. `tiers` from the fastest to the slowest, each with its own label; none at all is a cache that
    always misses. `origin` describes this machine: it is written into entries, and entries from a machine unlike it
    are refused. `on_event(kind, data)` hears of everything; what it raises is counted and dropped."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        keyring: Keyring | None = None,
        origin: Origin | None = None,
        versions: Mapping[str, str] | None = None,
        max_age_s: float | None = None,
        max_entry_bytes: int = 2 << 30,
        lease_ttl_s: float = 10.0,
        on_event: Observer | None = None,
        exit_flush_s: float = 5.0,
    ) -> None:
        self.tiers = tuple(tiers)
        if len({tier.label for tier in self.tiers}) != len(self.tiers):
            raise ValueError(f"two tiers with one label: {[tier.label for tier in self.tiers]}")
        self.keyring = keyring if keyring is not None else Keyring()
        self.origin = origin
        # For a key whose entry is bound to less than this machine, as one made for a device that it need not have.
        self.origin_of: Callable[[Key], Origin] | None = None
        self.versions = dict(versions or {})
        self.max_age_s = max_age_s
        self.max_entry_bytes = max_entry_bytes
        self.on_event = on_event
        self._writer = Writer(exit_flush_s=exit_flush_s)
        self._leases = Leases([tier for tier in self.tiers if not self._no_write(tier)], lease_ttl_s, self._count)
        self._reset()
        call_after_fork(self._reset)

    def lookup(self, key: Key) -> Entry | Miss:
        """The entry from the first tier that has a good one, copied into the faster tiers; else why not."""
        result, misses = self._search(key)
        for miss in misses:
            self._count(miss.tier, f"miss:{miss.code}")
        if isinstance(result, Entry):
            self._count(result.tier, "hits")
            self._event("hit", key=key.digest, tier=result.tier, seconds=result.seconds)
        else:
            self._event("miss", key=key.digest, reason=result.reason, tiers=result.tiers, seconds=result.seconds)
        return result

    def peek(self, key: Key) -> Entry | Miss:
        """`lookup` that counts neither a hit nor a miss: for polling."""
        return self._search(key)[0]

    def spread(self, key: Key) -> Entry | Miss:
        """`peek`, and the entry goes into the slower tiers that this process may write and that have no good one. A
        Miss too where one of them does not take it as it is: it needs a signature that the entry has not."""
        found = self.peek(key)
        if isinstance(found, Miss):
            return found
        labels = [tier.label for tier in self.tiers]
        slower = [tier for tier in self.tiers[labels.index(found.tier) + 1 :] if not self._no_write(tier)]
        lacking = [tier for tier in slower if not isinstance(self._read(tier, key), Found)]
        if any(tier.needs_signature and self.keyring.refusal(found.manifest) for tier in lacking):
            return Miss(key, "unsigned")
        if lacking:
            near = self._read(self.tiers[labels.index(found.tier)], key)
            if not isinstance(near, Found):
                return Miss(key, near.code)
            self._fill(lacking, key, near)
        return found

    def publish(
        self,
        key: Key,
        blobs: Mapping[str, bytes],
        *,
        metadata: Mapping[str, Any] | None = None,
        lead: Lead | None = None,
    ) -> Published:
        """Writes an entry, over whatever is there: tiers of this host at once, shared ones in the background.

        `lead` is released when the last tier is written, so that whoever waits for it finds the entry.
        """
        try:
            manifest, stored = self._build(key, blobs, metadata or {})
            data = manifest.to_bytes()
            parse(data, key)  # what we could not read back must not be written
        except (Unencodable, ManifestError) as error:
            if lead is not None:
                lead.release()
            return Published(None, refused=(TierMiss("", "bad-field", str(error)),))
        written: list[str] = []
        queued: list[str] = []
        refused: list[TierMiss] = []
        for tier in self.tiers:
            no = self._no_write(tier)
            if no:
                refused.append(TierMiss(tier.label, no))
            elif tier.shared:
                size = len(data) + sum(map(len, stored.values()))
                if self._writer.submit(size, self._write_job(tier, key, data, stored)):
                    queued.append(tier.label)
                else:
                    self._count(tier.label, "write-failed:queue-full")
                    refused.append(TierMiss(tier.label, "queue-full"))
            elif (failed := self._write(tier, key, data, stored)) is None:
                written.append(tier.label)
            else:
                refused.append(failed)
        if lead is not None:
            lead.hand_over()
            # the queue keeps its order: this runs when everything above is written
            if not (queued and self._writer.submit(0, lead.release)):
                lead.release()
        self._event("publish", key=key.digest, written=written, queued=queued, refused=refused)
        return Published(manifest, tuple(written), tuple(queued), tuple(refused))

    def flight(self, key: Key) -> Lead | Follow:
        """Who makes the missing entry. A Lead: this caller; release it, or hand it to `publish`. A Follow: another
        one is at it (or has just finished); `wait` for the result, or do without. Never blocks on the maker."""
        got = self._leases.take(key)
        if isinstance(got, Lead):
            # somebody may have published between our lookup and our lease: look again, or a key is compiled twice
            entry = self.peek(key)
            if isinstance(entry, Entry):
                got.release()
                return Follow(self.peek, self._leases, key, entry)
            self._event("lead", key=key.digest, tier=got.tier)
            return got
        self._event("follow", key=key.digest, tier=got.tier, owner=got.owner)
        return Follow(self.peek, self._leases, key, None)

    def fetch(self, key: Key, wait_s: float, given_up: Callable[[], bool] = lambda: False) -> Entry | Lead | Miss:
        """Lookup with single flight, for callers that can wait: an Entry to use, a Lead to make it and publish, or,
        when others took longer than `wait_s`, a Miss("wait-timeout") to make it without a lead; or a Miss("given-up")
        as soon as `given_up`, which is asked again and again, says so."""
        deadline = time.monotonic() + wait_s
        result = self.lookup(key)
        while isinstance(result, Miss):
            flight = self.flight(key)
            if isinstance(flight, Lead):
                return flight
            left = deadline - time.monotonic()
            result = flight.wait(max(0.0, left), given_up)
            if isinstance(result, Miss) and (result.reason != "lease-free" or left <= 0):
                return result
            if isinstance(result, Miss):
                time.sleep(0.01)  # where a lease can be read but not taken, do not spin
        return result

    def _origin(self, key: Key) -> Origin | None:
        return self.origin if self.origin is None or self.origin_of is None else self.origin_of(key)

    def policy(self, tier: Tier, key: Key | None = None) -> Policy:
        """What is accepted from a tier, now, where a key is looked for."""
        origin = self.origin if key is None else self._origin(key)
        max_age_ms = None if self.max_age_s is None else int(self.max_age_s * 1000)
        now_ms = int(time.time() * 1000)
        return Policy(self.keyring, tier.needs_signature, origin, max_age_ms, now_ms, self.max_entry_bytes)

    def adopt(self, found: Found) -> None:
        """Writes a verified entry as it is, its writer's signature included, into every tier that may hold it."""
        self._fill(self.tiers, found.manifest.key, found)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Waits for the background writes; False when they took longer."""
        return self._writer.flush(timeout_s)

    def stats(self) -> dict[str, dict[str, float]]:
        """Counters per tier: hits, miss:CODE, writes, write-failed:CODE, bytes_read, bytes_written, read_seconds,
        write_seconds, fills, quarantined, leads, follows, ... and "breaker_open" (0 or 1)."""
        with self._lock:
            out: dict[str, dict[str, float]] = {label: dict(counts) for label, counts in self._counts.items()}
        for tier in self.tiers:
            out.setdefault(tier.label, {})["breaker_open"] = float(tier.guard.breaker.is_open)
        return out

    def close(self, flush_s: float = 5.0) -> bool:
        """Flushes, releases leases, closes the stores. False when writes were left undone."""
        done = self.flush(flush_s)
        self._leases.release_all()
        for tier in self.tiers:
            tier.store.close()
        return done

    def _search(self, key: Key) -> tuple[Entry | Miss, list[TierMiss]]:
        began = time.perf_counter()
        misses: list[TierMiss] = []
        for i, tier in enumerate(self.tiers):
            found = self._read(tier, key)
            if isinstance(found, Found):
                self._fill(self.tiers[:i], key, found)
                seconds = time.perf_counter() - began
                self._count(tier.label, "bytes_read", len(found.manifest_bytes) + sum(map(len, found.stored.values())))
                self._count(tier.label, "read_seconds", seconds)
                return Entry(key, found.manifest, found.blobs, tier.label, seconds), misses
            misses.append(TierMiss(tier.label, found.code, found.detail))
        reason = next((miss.code for miss in misses if miss.code != "absent"), "absent" if misses else "off")
        return Miss(key, reason, tuple(misses), time.perf_counter() - began), misses

    def _read(self, tier: Tier, key: Key) -> Found | Refused:
        policy = self.policy(tier, key)
        try:
            found = tier.guard.call(lambda: read_entry(tier.store, key, policy), tier.timeout_s)
        except StoreError as error:
            return Refused(error.code, str(error))
        if isinstance(found, Refused) and found.code in DAMAGE:
            self._event("damaged", key=key.digest, tier=tier.label, code=found.code, detail=found.detail)
            # never on a shared tier: another reader's keys or version may see a good entry there
            if found.culprit and not tier.shared:
                self._quarantine(tier, found)
        return found

    def _quarantine(self, tier: Tier, refused: Refused) -> None:
        try:
            tier.guard.call(lambda: tier.store.quarantine(refused.culprit, refused.code), tier.timeout_s)
            self._count(tier.label, "quarantined")
        except StoreError as error:
            self._count(tier.label, f"quarantine-failed:{error.code}")

    def _fill(self, tiers: Sequence[Tier], key: Key, found: Found) -> None:
        size = len(found.manifest_bytes) + sum(map(len, found.stored.values()))
        for tier in tiers:
            if not tier.writable or (tier.needs_signature and self.keyring.refusal(found.manifest)):
                continue
            if tier.shared:
                self._writer.submit(size, self._write_job(tier, key, found.manifest_bytes, found.stored, "fills"))
            else:
                self._write(tier, key, found.manifest_bytes, found.stored, "fills")

    def _build(
        self, key: Key, blobs: Mapping[str, bytes], metadata: Mapping[str, Any]
    ) -> tuple[Manifest, dict[str, bytes]]:
        described = []
        stored: dict[str, bytes] = {}
        for name, raw in blobs.items():
            codec, packed = pack(raw)
            digest = hashlib.sha256(packed).hexdigest()
            raw_digest = digest if codec == "none" else hashlib.sha256(raw).hexdigest()
            described.append(Blob(name, digest, len(packed), codec, raw_digest, len(raw)))
            stored[f"cas/{digest}"] = packed
        manifest = Manifest(
            key, tuple(described), dict(self.versions), self._origin(key) or Origin(), int(time.time() * 1000),
            freeze(metadata, "metadata"),
        )  # fmt: skip
        return self.keyring.sign(manifest), stored

    def _no_write(self, tier: Tier) -> str:
        if not tier.writable:
            return "read-only"
        return "not-a-writer" if tier.needs_signature and not self.keyring.can_sign else ""

    def _write_job(
        self, tier: Tier, key: Key, manifest: bytes, stored: Mapping[str, bytes], count: str = "writes"
    ) -> Callable[[], None]:
        def job() -> None:
            self._write(tier, key, manifest, stored, count)

        return job

    def _write(
        self, tier: Tier, key: Key, manifest: bytes, stored: Mapping[str, bytes], count: str = "writes"
    ) -> TierMiss | None:
        def work() -> None:
            # blobs first, the manifest last: whoever sees the manifest can have the rest
            for name, data in stored.items():
                tier.store.put(name, data)
            tier.store.put(f"ac/{key.digest}", manifest)

        began = time.perf_counter()
        try:
            tier.guard.call(work, tier.write_timeout_s, background=tier.shared)
        except StoreError as error:
            self._count(tier.label, f"write-failed:{error.code}")
            self._event("write-failed", key=key.digest, tier=tier.label, code=error.code, detail=str(error))
            return TierMiss(tier.label, error.code, str(error))
        seconds = time.perf_counter() - began
        size = len(manifest) + sum(map(len, stored.values()))
        self._count(tier.label, count)
        self._count(tier.label, "bytes_written", size)
        self._count(tier.label, "write_seconds", seconds)
        self._event("write", key=key.digest, tier=tier.label, bytes=size, seconds=seconds)
        return None

    def _count(self, label: str, what: str, amount: float = 1) -> None:
        with self._lock:
            self._counts[label][what] += amount

    def _event(self, kind: str, **data: Any) -> None:
        if self.on_event is None:
            return
        try:
            self.on_event(kind, data)
        except Exception:  # an observer must not break what it observes; the count shows that it tried
            self._count("", "observer-errors")

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
