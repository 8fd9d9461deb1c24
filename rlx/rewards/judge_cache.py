"""Replies of a judge on disk, by the content that was asked. No JAX.

Several processes may share a folder: a file is written beside its place and then moved there, so
that a reader sees a whole reply or none.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def key(content: Mapping[str, Any]) -> str:
    """The same for the same content, in every process."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def recall(folder: str, key: str) -> str | None:
    """The reply; None where there is none that can be read."""
    try:
        entry = json.loads(_place(folder, key).read_bytes())
    except (OSError, ValueError):
        return None
    reply = entry.get("reply") if isinstance(entry, dict) else None
    return reply if isinstance(reply, str) else None


def keep(folder: str, key: str, content: Mapping[str, Any], reply: str) -> None:
    """Keep a reply, with what was asked beside it for people to read."""
    place = _place(folder, key)
    # A full disk costs the cache and not the verdict, which has been paid for.
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=place.parent, suffix=".partial")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123
                json.dump({**content, "reply": reply}, file)
            os.replace(partial, place)  # noqa: PTH105
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise


def _place(folder: str, key: str) -> Path:
    return Path(folder) / key[:2] / f"{key}.json"
