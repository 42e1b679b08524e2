# SPDX-License-Identifier: MIT
"""What Overmind knows about one loader before it is called, and one call of it, bound to names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


def nothing(_call: BoundCall) -> None:
    """Default of Loader.refuse and Loader.ambient."""


@dataclass(frozen=True)
class Loader:
    """A loader function: how its calls are keyed. Immutable; shared between threads."""

    name: str
    """Shown to people and part of the key: "transformers.PreTrainedModel.from_pretrained"."""
    target: str = ""
    """Parameter that names what is loaded; empty: the first argument."""
    hub: bool = False
    """The target may be a hub repo id: resolved to a commit on the client, at every call."""
    embeds_modules: bool = False
    """nn.Module arguments go into the result as they are; their weights are not looked at."""
    fills: str = ""
    """Parameter that takes a dict into which the load sets values, or "parameter.attribute" if its value holds such a
    dict, which the load only writes: part of the result. Of what it holds before, names are part of the key."""
    libraries: tuple[str, ...] = ()
    """Import names whose versions, log levels and environment variables are part of the key."""
    archive: bool = False
    """The target is a file of torch.jit.save, and the result the module in it."""
    changes_process: bool = True
    """While it runs it may change settings of the whole process, and so what loads in other threads make."""
    refuse: Callable[[BoundCall], str | None] = nothing
    """A reason why this call can't be cached, or None."""
    ambient: Callable[[BoundCall], object] = nothing
    """Inputs that are not arguments, e.g. torch's safe globals; canonicalised into the key."""


@dataclass
class BoundCall:
    """One call, its arguments bound to parameters by name. Holds the caller's own objects."""

    loader: Loader
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    owner: type | None = None
    """The class that a classmethod loader was called on."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Defaults applied; **kwargs flattened; *args under its own name as a tuple."""
    filled: dict[Any, Any] | None = field(init=False)
    """The caller's dict that the load fills in (Loader.fills), if this call gives one."""
    before: dict[Any, Any] = field(init=False)
    """What that dict held when the call was bound."""

    def __post_init__(self) -> None:
        name, _, attribute = self.loader.fills.partition(".")
        found = self.arguments.get(name)
        if attribute:
            found = getattr(found, "__dict__", {}).get(attribute)
        self.filled = found if isinstance(found, dict) else None
        self.before = dict(self.filled or {})

    def set_by_load(self) -> dict[Any, Any]:
        """What the load has set in `filled`. A parameter's own values before are no part of the key, so all of them;
        what an attribute holds from other loads stays there."""
        assert self.filled is not None
        if "." not in self.loader.fills:
            return dict(self.filled)
        return {name: value for name, value in self.filled.items() if self.before.get(name, self) is not value}
