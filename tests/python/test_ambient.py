# SPDX-License-Identifier: MIT
"""The hidden inputs of a load: each one that a loader can see changes the key, or stops the caching."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from overmind import ambient
from overmind.encoding import Encoder, Uncacheable

LIBRARIES = frozenset({"torch", "transformers"})


def state(libraries: frozenset[str] = LIBRARIES) -> bytes:
    encoder = Encoder()
    ambient.write(encoder, libraries)
    return b"".join(encoder.parts)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def calling(set_to: Callable[[Any], None], value: Any, back: Any) -> Iterator[None]:
    set_to(value)
    try:
        yield
    finally:
        set_to(back)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "dtype": lambda: default_dtype(torch.float64),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "device": lambda: torch.device("cpu"),
    "default device": lambda: calling(torch.set_default_device, "cpu", None),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: calling(torch.use_deterministic_algorithms, True, False),
    "matmul": lambda: calling(torch.set_float32_matmul_precision, "medium", "highest"),
    "swap": lambda: calling(torch.__future__.set_swap_module_params_on_conversion, True, False),
    "skip_data": torch.serialization.skip_data,
    "endianness": lambda: calling(
        torch.serialization.set_default_load_endianness, torch.serialization.LoadEndianness.BIG, None
    ),
}


@pytest.mark.parametrize("name", MODES)
def test_k08_a_mode_of_torch_is_part_of_the_key_and_leaves_it_again(name: str) -> None:
    before = state()
    with MODES[name]():
        assert state() != before
    assert state() == before


def test_modes_differ_from_each_other() -> None:
    seen = set()
    for enter in MODES.values():
        with enter():
            seen.add(state())
    assert len(seen) == len(MODES) - 1  # a device context and the default device are one thing to torch


def test_k08_under_the_meta_device_nothing_is_cached() -> None:
    with torch.device("meta"), pytest.raises(Uncacheable, match="meta"):
        state()


class OwnFunctionMode(torch.overrides.TorchFunctionMode):
    """A mode that Overmind knows nothing of."""


class OwnDispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    """Another one."""


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        yield


@pytest.mark.parametrize("mode", [OwnFunctionMode, OwnDispatchMode, empty_weights])
def test_unknown_modes_are_refused(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    with mode(), pytest.raises(Uncacheable):
        state()
    state()


def test_a_transform_is_refused() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(Uncacheable, match=r"torch\.func"):
            state()
        return x

    torch.func.vmap(inside)(torch.zeros(2))


def test_k09_the_environment_that_loaders_read_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    seen = [state()]
    for name, value in [
        ("HF_HOME", "/a"), ("HF_HOME", "/b"), ("HF_HUB_OFFLINE", "1"), ("HF_TOKEN", "secret"), ("HF_TOKEN", "other"),
        ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1"), ("BNB_X", "1"), ("HOME", "/nowhere"),
    ]:  # fmt: skip
        monkeypatch.setenv(name, value)
        seen.append(state())
    assert len(set(seen)) == len(seen)
    monkeypatch.setenv("UNRELATED", "1")
    assert state() == seen[-1]


def test_names_and_values_of_variables_do_not_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_A", "bHF_C")
    one = state()
    monkeypatch.setenv("HF_A", "b")
    monkeypatch.setenv("HF_C", "")
    assert state() != one


def test_levels_of_the_libraries_are_part_of_the_key() -> None:
    logger = logging.getLogger("transformers")
    before, level = state(), logger.level
    try:
        logger.setLevel(logging.ERROR)
        assert state() != before
    finally:
        logger.setLevel(level)
    assert state() == before
    logging.disable(logging.WARNING)
    try:
        assert state() != before
    finally:
        logging.disable(logging.NOTSET)


def test_silenced_warnings_are_part_of_the_key() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        before = state()
        warnings.simplefilter("ignore")
        assert state() != before


def test_versions_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    before = state()
    # An upgrade is a new process; what is replaced here is the module, as after a reload.
    module = type(sys)("transformers")
    module.__dict__["__version__"] = "0.0"
    monkeypatch.setitem(sys.modules, "transformers", module)
    assert state() != before
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    assert state() == before


@pytest.mark.parametrize(
    "name",
    ["torch", "transformers", "diffusers", "safetensors", "tokenizers", "numpy", "accelerate", "huggingface_hub"],
)
def test_a_version_is_the_same_before_and_after_the_import(name: str) -> None:
    source = (
        f"import sys; from overmind import ambient; before = ambient.version({name!r});"
        f"assert {name!r} not in sys.modules; import {name}; assert ambient.version({name!r}) == before != 'absent'"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", source], env=environment, check=True)
    assert ambient.version("no_such_library") == "absent"


def test_torch_that_was_just_imported_is_as_torch_that_is_not_there() -> None:
    source = (
        "from overmind import ambient; assert ambient.torch_state() == ''; import torch;"
        "assert ambient.torch_state() == '', ambient.torch_state()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", source], env=environment, check=True)


def test_the_key_of_a_first_load_imports_nothing_of_torch() -> None:
    """torch.onnx is lazy and takes 0.1 s; asking whether an export runs must not import it."""
    source = """
    import sys, torch
    from overmind import ambient
    before = set(sys.modules)
    ambient.torch_state()
    new = [name for name in set(sys.modules) - before if name.startswith("torch.")]
    assert new == [], new
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=True, timeout=60)
