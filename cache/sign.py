"""Who may write entries that others will run: signatures over a manifest's canonical bytes.

Executables are native code, so a shared store is only as trustworthy as everybody who can write to it, unless entries
are signed. Two schemes, one table: Ed25519 (a reader holds only public keys and can sign nothing) and HMAC-SHA256
(standard library only; whoever can read can also write).

Keys arrive as text, one a line, from a file or a variable that the caller read:

    ed25519-private:BASE64 of 32 bytes      may write and read
    ed25519-public:BASE64 of 32 bytes       may read
    hmac-sha256:BASE64 of 32 or more bytes  may write and read
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from fused_eager.cache.extras import need
from fused_eager.cache.manifest import Manifest, Signature

REFUSALS = {
    "unsigned": "the manifest carries no signature",
    "unknown-signer": "signed by a key that is not in this reader's keyring",
    "bad-signature": "the signature does not fit the manifest",
}


class KeyTextError(ValueError):
    """A key text that cannot be used. Says the line, never its content: it may be a secret."""


@dataclass(frozen=True, repr=False)
class SigningKey:
    """One key. `sign` is None for a key that may only read."""

    algorithm: str
    key_id: str
    verify: Callable[[bytes, bytes], bool]
    sign: Callable[[bytes], bytes] | None = None

    def __repr__(self) -> str:  # never the key itself
        return f"SigningKey({self.algorithm}, {self.key_id}, {'writer' if self.sign else 'reader'})"


@dataclass(frozen=True)
class Keyring:
    """The keys of this process: entries by any of them are accepted, the first that can sign signs."""

    keys: tuple[SigningKey, ...] = ()

    @property
    def can_sign(self) -> bool:
        return any(key.sign for key in self.keys)

    def sign(self, manifest: Manifest) -> Manifest:
        """The manifest with a signature, or without one when no key here may write."""
        for key in self.keys:
            if key.sign is not None:
                value = key.sign(manifest.signed_bytes())
                return manifest.signed(Signature(key.algorithm, key.key_id, value))
        return manifest.signed(None)

    def refusal(self, manifest: Manifest) -> str:
        """A row of REFUSALS, or "" for a manifest that one of these keys signed."""
        signature = manifest.signature
        if signature is None:
            return "unsigned"
        for key in self.keys:
            if (key.algorithm, key.key_id) == (signature.algorithm, signature.key_id):
                return "" if key.verify(manifest.signed_bytes(), signature.value) else "bad-signature"
        return "unknown-signer"


def load_keyring(text: bytes) -> Keyring:
    """The keyring of a key text (see the module). Blank lines and lines starting with # are skipped.

    Raises KeyTextError naming the line, and MissingExtra for an Ed25519 key without the library.
    """
    keys = []
    for number, line in enumerate(text.split(b"\n"), 1):
        line = line.strip()
        if not line or line.startswith(b"#"):
            continue
        kind, _, body = line.partition(b":")
        maker = _MAKERS.get(kind.strip().decode(errors="replace"))
        if maker is None:
            raise KeyTextError(f"line {number}: starts with none of {', '.join(_MAKERS)}")
        try:
            keys.append(maker(base64.b64decode(body.strip(), validate=True)))
        except (binascii.Error, ValueError) as error:
            raise KeyTextError(f"line {number}: {error}") from None
    return Keyring(tuple(keys))


def generate(kind: str) -> dict[str, str]:
    """New key lines: {"writer": ..., "reader": ...}. `kind` is "ed25519" or "hmac-sha256" (one line for both)."""
    if kind == "hmac-sha256":
        line = _line("hmac-sha256", secrets.token_bytes(32))
        return {"writer": line, "reader": line}
    if kind != "ed25519":
        raise ValueError(f"no such kind of key: {kind}")
    seed = secrets.token_bytes(32)
    private = need("cryptography.hazmat.primitives.asymmetric.ed25519").Ed25519PrivateKey.from_private_bytes(seed)
    public = private.public_key().public_bytes_raw()
    return {"writer": _line("ed25519-private", seed), "reader": _line("ed25519-public", public)}


def _line(kind: str, data: bytes) -> str:
    return f"{kind}:{base64.b64encode(data).decode()}"


def _ed25519_private(seed: bytes) -> SigningKey:
    _exactly(seed, 32)
    private = need("cryptography.hazmat.primitives.asymmetric.ed25519").Ed25519PrivateKey.from_private_bytes(seed)
    public = _ed25519_public(private.public_key().public_bytes_raw())
    return SigningKey(public.algorithm, public.key_id, public.verify, private.sign)


def _ed25519_public(data: bytes) -> SigningKey:
    _exactly(data, 32)
    public = need("cryptography.hazmat.primitives.asymmetric.ed25519").Ed25519PublicKey.from_public_bytes(data)
    invalid = need("cryptography.exceptions").InvalidSignature

    def verify(message: bytes, value: bytes) -> bool:
        try:
            public.verify(value, message)
        except invalid:
            return False
        return True

    return SigningKey("ed25519", hashlib.sha256(b"fused-eager/key-id/1\0" + data).hexdigest()[:16], verify)


def _hmac(secret: bytes) -> SigningKey:
    if len(secret) < 32:
        raise ValueError("a secret of 32 or more bytes is needed")

    def sign(message: bytes) -> bytes:
        return hmac.digest(secret, message, "sha256")

    # the id is an HMAC too: a plain hash of the secret would let anybody test guesses without a message
    key_id = hmac.digest(secret, b"fused-eager/key-id/1\0", "sha256").hex()[:16]
    return SigningKey("hmac-sha256", key_id, lambda message, value: hmac.compare_digest(sign(message), value), sign)


def _exactly(data: bytes, size: int) -> None:
    if len(data) != size:
        raise ValueError(f"{size} bytes are needed, not {len(data)}")


_MAKERS: dict[str, Callable[[bytes], SigningKey]] = {
    "ed25519-private": _ed25519_private,
    "ed25519-public": _ed25519_public,
    "hmac-sha256": _hmac,
}
