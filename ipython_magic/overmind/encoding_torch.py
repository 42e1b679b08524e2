# SPDX-License-Identifier: MIT
"""Encoding of what torch, numpy and their users add to the plain values. Imports none of them."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from overmind import encoding, quirks
from overmind.encoding import MAX_ARRAY, Encoder, Node

_STRINGS = ("dtype", "device", "layout", "memory_format")


def handler(kind: type) -> Any:
    """The function that encodes objects of class `kind`, or None."""
    torch = sys.modules.get("torch")
    if torch is not None:
        if kind in tuple(getattr(torch, name) for name in _STRINGS):
            return _named
        if kind is torch.Size:
            return _size
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return _tensor
        if issubclass(kind, torch.nn.Module):
            return module
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if kind is numpy.ndarray:
            return _array
        if issubclass(kind, numpy.generic) and kind.__module__ == "numpy":
            return _numpy_scalar
        if issubclass(kind, numpy.dtype):
            return _numpy_dtype
    if kind.__name__ == "AddedToken" and kind.__module__.partition(".")[0] == "tokenizers":
        return _added_token
    return None


def _named(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    encoder.parts.append(b"x")
    encoder.text(type(value).__name__)
    encoder.text(str(value))


def _size(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    encoder.parts.append(b"S")
    encoder.sequence(tuple(value), len(value), parent, step)


def _tensor(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    node = encoder.node(value, parent, step)
    if node is None:
        return
    torch = sys.modules["torch"]
    if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized or value.is_conj():
        raise encoder.refuse(value, "is or holds a tensor that is not a plain one on the CPU")
    if value.is_neg() or value.grad_fn is not None or value.grad is not None or value._backward_hooks:
        raise encoder.refuse(value, "is or holds a tensor with a gradient")
    nbytes = value.numel() * value.element_size()
    if nbytes > MAX_ARRAY:
        raise encoder.refuse(value, f"is or holds a tensor of {nbytes} bytes, too big to compare at every call")
    if not value.is_contiguous():
        raise encoder.refuse(value, "is or holds a tensor that is not contiguous")
    encoder.parts.append(b"V")
    encoder.text(type(value).__name__)
    encoder.text(
        f"{value.dtype} {list(value.shape)} {list(value.stride())} {value.requires_grad} {value.is_inference()}"
    )
    encoder.raw(b"b", ctypes.string_at(value.data_ptr(), nbytes) if nbytes else b"")
    encoder.attributes(value, node)


def _array(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    if encoder.node(value, parent, step) is None:
        return
    if value.dtype.hasobject or value.dtype.fields is not None:
        raise encoder.refuse(value, "is or holds an array of objects or records")
    if value.nbytes > MAX_ARRAY:
        raise encoder.refuse(value, f"is or holds an array of {value.nbytes} bytes, too big to compare at every call")
    flags = value.flags
    encoder.parts.append(b"A")
    encoder.text(f"{value.dtype.str} {value.shape} {value.strides} {flags.writeable} {flags.owndata} {flags.aligned}")
    encoder.raw(b"b", value.tobytes())


def _numpy_scalar(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    if value.dtype.hasobject or value.dtype.fields is not None:
        raise encoder.refuse(value)
    encoder.parts.append(b"a")
    encoder.text(value.dtype.str)
    encoder.raw(b"b", value.tobytes())


def _numpy_dtype(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    if value.hasobject or value.fields is not None or value.metadata or value.subdtype is not None:
        raise encoder.refuse(value)
    encoder.parts.append(b"y")
    encoder.text(value.str)


def _added_token(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    if encoder.node(value, parent, step) is None:
        return
    encoder.parts.append(b"K")
    for name in ("content", "single_word", "lstrip", "rstrip", "normalized", "special"):
        encoder.value(getattr(value, name), None, [])


_MODULE_FACTS = ("config", "_internal_dict", "generation_config", "peft_config", "hf_device_map", "quantization_config")


def module(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    """An nn.Module that is put into the result as it is: its facts, not its weights."""
    if not encoder.embeds:
        raise encoder.refuse(
            value, f"is or holds a {type(value).__qualname__}, and this loader may look at its weights"
        )
    node = encoder.node(value, parent, step, tree=True)
    if node is None:
        return
    state = encoding.state(value)
    encoder.parts.append(b"W")
    encoder.reference(type(value))
    encoder.quietly(lambda: _module_facts(encoder, state, node))


def _module_facts(encoder: Encoder, state: dict[str, Any], node: Node) -> None:
    facts = [name for name in state if _is_fact(name, state[name])]
    encoder.parts.append(b"%d:" % len(facts))
    for name in facts:
        encoder.text(name)
        encoder.value(state[name], node, ["t", name])
    hook = state.get("_hf_hook")
    encoder.text(type(hook).__qualname__)
    encoder.text(type(state.get("hf_quantizer")).__qualname__)
    encoder.parts.append(b"T" if "forward" in state else b"F")
    for table in ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks"):
        encoder.parts.append(b"%d;" % len(state.get(table) or ()))
    for tensor in _samples(node.value):
        encoder.text(f"{type(tensor).__qualname__} {tensor.dtype} {tensor.device}")


def _is_fact(name: str, part: Any) -> bool:
    return name in _MODULE_FACTS or (encoding.is_scalar(part) and (not name.startswith("_") or name == "_is_quantized"))


def _samples(root: Any) -> list[Any]:
    """The first parameter or buffer, and the first of a floating type: where a loader reads dtype and device."""
    first = None
    stack = [root]
    while stack:
        part = stack.pop()
        quirks.complete(part, object.__getattribute__(part, "__dict__"))
        state = encoding.state(part)
        for table in ("_parameters", "_buffers"):
            for tensor in (state.get(table) or {}).values():
                if tensor is None:
                    continue
                first = tensor if first is None else first
                if tensor.is_floating_point():
                    return [first, tensor]
        stack.extend(child for child in reversed(list((state.get("_modules") or {}).values())) if child is not None)
    return [] if first is None else [first]


def embedded(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    """A tokenizer or processor that is put into the result as it is: its class and its plain attributes."""
    if not encoder.embeds:
        raise encoder.refuse(value, f"is or holds a {type(value).__qualname__}, which this loader may look into")
    node = encoder.node(value, parent, step, tree=True)
    if node is None:
        return
    encoder.parts.append(b"E")
    encoder.reference(type(value))
    encoder.quietly(lambda: _embedded_facts(encoder, encoding.state(value), node))


def _embedded_facts(encoder: Encoder, state: dict[str, Any], node: Node) -> None:
    # Its Rust part, built or not (quirks/tokenizers.py), is not looked into.
    facts = sorted((name, part) for name, part in state.items() if name != "_tokenizer")
    encoder.parts.append(b"%d:" % len(facts))
    for name, part in facts:
        encoder.text(name)
        if _plain(part):
            encoder.value(part, node, ["t", name])
        else:
            handler = encoding._handler_of(part)
            if handler in (embedded, module):
                handler(encoder, part, node, ["t", name])
            else:
                encoder.text(type(part).__qualname__)


def _plain(value: Any, depth: int = 0) -> bool:
    """Nothing but plain values and short containers of them."""
    if encoding.is_scalar(value):
        return True
    if depth > 4 or type(value) not in (list, tuple, dict) or len(value) > 64:
        return False
    if type(value) is dict:
        return all(encoding.is_scalar(key) and _plain(part, depth + 1) for key, part in value.items())
    return all(_plain(part, depth + 1) for part in value)
