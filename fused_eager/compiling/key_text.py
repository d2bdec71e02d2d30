"""A key as one line of text, for the event log: its parts as JSON, compressed, for a region has hundreds of nodes."""

from __future__ import annotations

import base64
import json

from fused_eager.cache import Key, Unencodable
from fused_eager.cache.pack import CODECS, PackError

LARGEST = 1 << 28  # bytes of the JSON: what claims to be more is damaged, or nothing of ours
_pack, _unpack = CODECS["zlib"]


def packed(key: Key) -> str:
    """The line."""
    return base64.b64encode(_pack(key.text.encode())).decode()


def unpacked(text: str) -> Key:
    """The key that `packed` gives `text` for.

    Raises:
        ValueError: there is none.
    """
    try:
        return Key.from_json(json.loads(_unpack(base64.b64decode(text, validate=True), LARGEST)))
    except (PackError, Unencodable, ValueError) as error:
        raise ValueError(f"the parts of its key cannot be read: {error}") from error
