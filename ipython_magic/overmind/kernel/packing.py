# SPDX-License-Identifier: MIT
"""Python objects as the JSON of a message, by the rules that frontends know from ipykernel; without its imports,
which cost more than the whole of this kernel's."""

from __future__ import annotations

import binascii
import json
import math
import numbers
from collections.abc import Iterable, Mapping
from datetime import date, datetime
from typing import Any


def pack(value: Any) -> bytes:
    """JSON in UTF-8. ValueError or TypeError for what can't be said in JSON; repeated on a cleaned copy first, where
    keys become text and numbers without a JSON form their repr."""
    try:
        text = _encode(value)
    except (TypeError, ValueError):
        text = _encode(_cleaned(value))
    try:
        return text.encode()
    except UnicodeEncodeError:  # lone surrogates
        return text.encode("utf-8", "replace")


def unpack(text: bytes) -> Any:
    return json.loads(text)


def _default(value: Any) -> Any:
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.astimezone()).isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return binascii.b2a_base64(value, newline=False).decode("ascii")
    if isinstance(value, Iterable):
        return list(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{value!r} is not JSON serializable")


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_default).encode


def _cleaned(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        cleaned = {str(key): _cleaned(item) for key, item in value.items()}
        if len(cleaned) != len(value):
            raise ValueError("two keys of a dictionary would be the same in JSON")
        return cleaned
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_cleaned(item) for item in value]
    return value
