# SPDX-License-Identifier: MIT
"""Which functions of which library are loaders. One file per library; each has HOOKS, (module name, what to do when
it is imported). None of these files imports its library."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from overmind.patching import ImportHooks, PatchSet

Patch = Callable[[PatchSet, ModuleType], None]


def install(patches: PatchSet, hooks: ImportHooks) -> None:
    """Wraps every loader of the modules that are imported, now or as soon as they are."""
    from overmind.loaders import diffusers, safetensors, stable_fast, torch, torchscript, transformers

    for library in (torch, torchscript, safetensors, transformers, diffusers, stable_fast):
        for name, patch in library.HOOKS:
            hooks.add(name, _bound(patch, patches))


def _bound(patch: Patch, patches: PatchSet) -> Callable[[ModuleType], None]:
    return lambda module: patch(patches, module)
