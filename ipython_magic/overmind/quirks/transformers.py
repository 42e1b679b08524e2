# SPDX-License-Identifier: MIT
"""GenerationConfig keeps `hash(self)` to know later whether it was changed since it was loaded.

That hash goes over strings, so it holds in one process only: restored as it was, every config would look changed, and
`save_pretrained` refuses a changed config that is not valid where it only warns about an unchanged one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_HASH = "_original_object_hash"


def reducer(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
    """How the objects of this class are pickled into a skeleton; None: pickle's own way."""
    for base in kind.__mro__:
        if (base.__module__, base.__qualname__) == ("transformers.generation.configuration_utils", "GenerationConfig"):
            own = {name for cls in kind.__mro__[:-1] for name in cls.__dict__}
            return None if own & {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"} else _reduce
    return None


def _reduce(config: Any) -> tuple[Any, ...]:
    kept = config.__dict__.get(_HASH)
    if not isinstance(kept, int):
        return config.__reduce_ex__(5)  # type: ignore[no-any-return]
    now = hash(config)
    text = config.to_json_string(ignore_metadata=True)
    return restore, (type(config), dict(config.__dict__), kept == now, text if hash(text) == now else None)


def restore(kind: Any, attributes: dict[str, Any], unchanged: bool, text: str | None) -> Any:
    """Pickle's call on a hit: the attributes, and a hash that says the same as it said then.

    `text` is what the class hashes, if that was so when the config was taken: making it anew takes 1 ms.
    """
    config = kind.__new__(kind)
    config.__dict__.update(attributes)
    now = hash(config if text is None else text)
    config.__dict__[_HASH] = now if unchanged else ~now
    return config
