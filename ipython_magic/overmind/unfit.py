# SPDX-License-Identifier: MIT
"""Objects that pickle takes but does not give back as they were. Each is refused, with the reason that the user reads.

What pickle itself refuses (open files, locks, generators, lambdas, local classes, ...) needs no row here.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from overmind.quirks import tokenizers

Inspector = Callable[[Any], object]


class Unfit(Exception):  # noqa: N818 - a verdict, not a failure
    """str() names the object and says what would be lost."""


# (module, class) -> reason; subclasses are meant too.
UNFIT: dict[tuple[str, str], str] = {
    ("torch.fx.graph_module", "GraphModule"): "a torch.fx.GraphModule, which pickle traces anew",
    ("torch.jit._script", "ScriptModule"): "a TorchScript module, which has no pickle",
    ("torch.jit._script", "ScriptFunction"): "a TorchScript function, which has no pickle",
    ("torch._C", "ScriptModule"): "a TorchScript module, which has no pickle",
    ("torch._C", "ScriptFunction"): "a TorchScript function, which has no pickle",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "a compiled module, whose compilation pickle drops",
    ("torch.optim.optimizer", "Optimizer"): "an optimizer, whose hooks and own attributes pickle drops",
    ("torch._subclasses.fake_tensor", "FakeTensor"): "a fake tensor, which lives in its own mode",
    ("torch.utils.hooks", "BackwardHook"): "a backward hook in use",
    ("numpy", "memmap"): "a numpy.memmap, which pickle turns into a copy that is no file any more",
    ("logging", "Handler"): "a logging handler",
    ("multiprocessing.shared_memory", "SharedMemory"): "shared memory of other processes",
}


def inspector_of(add_array: Inspector) -> Callable[[type], Inspector | None]:
    """What to do with the objects of a type, asked once per type; None: nothing. `add_array` gets every numpy array."""

    def ask(kind: type) -> Inspector | None:
        for base in kind.__mro__:
            reason = UNFIT.get((base.__module__, base.__qualname__))
            if reason is not None:
                return _refusal(f"{reason} ({kind.__module__}.{kind.__qualname__})")
        numpy = sys.modules.get("numpy")
        if numpy is not None and issubclass(kind, numpy.ndarray):
            return _array_inspector(kind, numpy.ndarray, add_array)
        if kind.__module__.split(".")[0] == "tokenizers":
            return tokenizers.refuse_attributes
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(kind, torch.Tensor):
            return _tensor_inspector(kind, torch)
        return None

    return ask


def _refusal(reason: str) -> Inspector:
    def refuse(_: Any) -> None:
        raise Unfit(reason)

    return refuse


def reduce_method(method: types.MethodType) -> Any:
    """Pickle notes object and name, and gives back what the class has under that name: a package that gives one model
    another `forward` would find the old one. Such a method is refused."""
    name, owner = method.__func__.__name__, method.__self__
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    found = next((vars(kind)[name] for kind in kinds if name in vars(kind)), None)
    if getattr(found, "__func__", found) is not method.__func__:
        raise Unfit(f"a method {name} of a {type(owner).__qualname__} that has another one, which pickle would find")
    return method.__reduce__()


def _array_inspector(kind: Any, plain: Any, add_array: Inspector) -> Inspector:
    drops_attributes = (
        kind is not plain and kind.__reduce_ex__ is plain.__reduce_ex__ and kind.__reduce__ is plain.__reduce__
    )

    def inspect(array: Any) -> None:
        if drops_attributes and getattr(array, "__dict__", None):
            raise Unfit(
                f"a {kind.__module__}.{kind.__qualname__} whose attributes pickle drops ({', '.join(vars(array))})"
            )
        if not array.flags.forc and array.size:
            raise Unfit(
                "an array with gaps, turned, repeated or reversed axes, which pickle gives back as a plain block"
            )
        if array.dtype.hasobject and not array.flags.writeable:
            raise Unfit("a read-only array of objects, which pickle gives back as a writable one")
        add_array(array)

    return inspect


def _tensor_inspector(kind: Any, torch: Any) -> Inspector | None:
    if issubclass(kind, torch.nn.Parameter) and kind.__reduce_ex__ is torch.nn.Parameter.__reduce_ex__:
        return _refusal(f"a {kind.__module__}.{kind.__qualname__}, which pickle turns into a plain Parameter")
    if kind.__reduce_ex__ is torch.Tensor.__reduce_ex__ and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return _refuse_trainable
    return None


def _refuse_trainable(tensor: Any) -> None:
    if tensor.requires_grad:
        raise Unfit(f"a trainable {type(tensor).__qualname__}, which pickle gives back as the result of a computation")
