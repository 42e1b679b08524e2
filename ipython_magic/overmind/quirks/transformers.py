# SPDX-License-Identifier: MIT
"""What a class of transformers does beyond setting its attributes.

PreTrainedModel's constructor notes in a table of the library which outputs its class can record. Without that note
`output_hidden_states=True` records nothing, and says nothing: so a hit makes the note too, for the models whose class
has one when they are taken.

GenerationConfig keeps `hash(self)` to know later whether it was changed since it was loaded.

That hash goes over strings, so it holds in one process only: restored as it was, every config would look changed, and
`save_pretrained` refuses a changed config that is not valid where it only warns about an unchanged one.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable
from typing import Any

from overmind.quirks import nn_modules

_RECORDABLE = ("transformers.utils.output_capturing", "transformers.utils.generic")  # 5.24; older ones
_HASH = "_original_object_hash"


def reducer(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
    """How the objects of this class are pickled into a skeleton; None: pickle's own way."""
    for base in kind.__mro__:
        where = (base.__module__, base.__qualname__)
        if where == ("transformers.modeling_utils", "PreTrainedModel"):
            return _reduce_model
        if where == ("transformers.generation.configuration_utils", "GenerationConfig"):
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
    """Pickle's call on a hit: the attributes, and a hash that says the same as it said then. One that says "changed"
    stays as it was: `torch.load` gives the number that its file holds, from whatever process that was.

    `text` is what the class hashes, if that was so when the config was taken: making it anew takes 1 ms.
    """
    config = kind.__new__(kind)
    config.__dict__.update(attributes)
    if unchanged:
        config.__dict__[_HASH] = hash(config if text is None else text)
    return config


def _recordable() -> dict[str, Any] | None:
    """The library's table, by the names of classes."""
    tables = (vars(sys.modules[name]).get("_CAN_RECORD_REGISTRY") for name in _RECORDABLE if name in sys.modules)
    return next((table for table in tables if isinstance(table, dict)), None)


def _reduce_model(model: Any) -> tuple[Any, ...]:
    nn_modules.refuse_compiled(model)
    reduced: tuple[Any, ...] = model.__reduce_ex__(5)
    table = _recordable()
    if table is None or str(type(model)) not in table:
        return reduced
    function, args, *rest = reduced
    if function is not copyreg.__newobj__ or len(args) != 1:  # type: ignore[attr-defined]
        raise ValueError(f"a {type(model).__qualname__}, which is pickled in a way of its own")
    return new_model, (*args, dict.__getitem__(table, str(type(model)))), *rest


def new_model(kind: Any, recordable: Any) -> Any:
    """Pickle's call on a hit: an object without attributes, whose class has its note."""
    table = _recordable()
    if table is not None:
        dict.__setitem__(table, str(kind), recordable)
    return kind.__new__(kind)
