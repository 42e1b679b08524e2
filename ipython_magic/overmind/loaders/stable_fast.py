# SPDX-License-Identifier: MIT
"""stable-fast: see quirks/stable_fast_jobs.py, which is imported when sfast is (20 ms that nobody else waits for)."""

from __future__ import annotations

from types import ModuleType

from overmind.patching import PatchSet


def _patch_tracing(patches: PatchSet, module: ModuleType) -> None:
    from overmind.quirks import stable_fast_jobs

    stable_fast_jobs.patch_tracing(patches, module)


def _patch_compiler(patches: PatchSet, module: ModuleType) -> None:
    from overmind.quirks import stable_fast_jobs

    stable_fast_jobs.patch_compiler(patches, module)


HOOKS = (
    ("sfast.jit.trace_helper", _patch_tracing),
    ("sfast.compilers.diffusion_pipeline_compiler", _patch_compiler),
)
