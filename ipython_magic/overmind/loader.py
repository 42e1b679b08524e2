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
    """Parameter that takes a dict whose values the load sets, for the names that are in it: part of the result."""
    libraries: tuple[str, ...] = ()
    """Import names whose versions, log levels and environment variables are part of the key."""
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
