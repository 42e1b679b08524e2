# SPDX-License-Identifier: MIT
"""TorchScript modules: code as an archive, weights and constants as storages of the entry, mapped and not copied.

torch.package writes and reads scripted modules with a table of storages beside the archive; here that table is the
entry's own. The graphs come back equal, with the places in the source that they came from.

Compiling the archive's code is what remains: 0.4 s of the 1.6 s of processor time that torch.jit.load takes for a
traced SD 1.5 UNet in fp16 (torch 2.13). So a hit does it when the module is first used: what torch keeps of it in the
instance (`_c`, `_modules`, ...) is asked of its class meanwhile, where descriptors stand. Code that uses operators or
classes of another library is compiled at once, because natively the load fails if that library is not there.

What torch.jit.load gave comes back exactly, with the code that is in the file (torchscript_file.py). A module that the
load itself scripted, traced or froze comes back as torch.jit.save and torch.jit.load would give it, in its own classes:
it computes the same, but values in its graph have other names, and the shapes that were noted while tracing are gone.
Python parts of a module that are no part of the archive (hooks, methods that were left out of the script) are refused,
with a reason.
"""

from __future__ import annotations

import io
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from overmind import modes
from overmind.quirks import torchscript_file

PENDING = "_overmind_script"  # in the __dict__ of a module whose code was not compiled yet

_SCRIPTED = ("torch.jit._script", "RecursiveScriptModule")
_TRACED = (("torch.jit._trace", "TracedModule"), ("torch.jit._trace", "TopLevelTracedModule"))
_OWN = {"_c", "_concrete_type", "_initializing", "_modules", "_parameters", "_buffers", "training"}
_LATER = ("_c", "_concrete_type", "_modules", "_parameters", "_buffers")
# In the code of an archive: operators and classes that a library registers. Those in prim and aten are torch's own.
_FOREIGN = re.compile(rb"\bops\.(?!prim\.|aten\.)|torch\.classes")
_BIG = 4096  # bytes; smaller constants of a graph stay in the archive: a traced UNet has thousands of single numbers


_lock = threading.RLock()


class Scripts:
    """The TorchScript modules of one result. Not thread-safe; keeps what it took alive."""

    def __init__(self, file: str | None = None) -> None:
        """`file`: torch.jit.load has just read the result from it."""
        self._file = file
        self._taken: set[int] = set()
        self._tensors: dict[int, Any] = {}  # by the address of the C++ tensor

    def reducer(self, kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
        """How the objects of this class are pickled into a skeleton; None: pickle's own way."""
        return self._reduce if (kind.__module__, kind.__qualname__) in (_SCRIPTED, *_TRACED) else None

    def refuse_shared(self, items: list[Any]) -> None:
        """`items`: what went out of band. ValueError for a tensor that Python holds as well: two would come back."""
        if self._tensors and any(getattr(item, "_cdata", None) in self._tensors for item in items if _is_tensor(item)):
            raise ValueError("a tensor that belongs to a TorchScript module and to something else")

    def _reduce(self, module: Any) -> tuple[Any, ...]:
        outline = _outline(module)
        storages = list(self._storages(module))
        archive, names = self._from_file(module._c, storages) or (write_archive(module._c, storages), [])
        parameters = [type(part).__qualname__ == "Parameter" for part in _parameters(module._c)]
        parameters = parameters if any(parameters) else []
        function = restore if _uses_libraries(archive) else restore_later
        return function, (pickle.PickleBuffer(archive), storages, outline, parameters, names)

    def _from_file(self, compiled: Any, storages: list[Any]) -> tuple[bytes, list[str]] | None:
        found = None if self._file is None else torchscript_file.read(self._file, compiled, _BIG)
        if found is None:
            return None
        archive, names = found
        if names.keys() != {storage._cdata for storage in storages}:
            return None  # some belong to constants of the code
        return archive, [names[storage._cdata] for storage in storages]

    def _storages(self, module: Any) -> Iterator[Any]:
        """Each storage of the module's tensors, once."""
        met: set[int] = set()
        for tensor in self._walk(module._c):
            refuse_lost_state(tensor)
            self._tensors[tensor._cdata] = tensor
            storage = tensor.untyped_storage()
            if storage._cdata not in met:
                met.add(storage._cdata)
                yield storage

    def _walk(self, compiled: Any) -> Iterator[Any]:
        from torch._C import BufferDict, ModuleDict, ParameterDict

        if hash(compiled) in self._taken:
            raise ValueError("a TorchScript module with a part that something else holds as well")
        stack, met = [compiled], {hash(compiled)}
        while stack:
            current = stack.pop()
            for table in (ParameterDict, BufferDict):
                yield from (tensor for _, tensor in items(table(current)) if tensor is not None)
            for name in current._method_names():
                yield from filter(is_big, constants(current._get_method(name).graph))
            parts = [part for _, part in items(ModuleDict(current)) if hash(part) not in met]
            met.update(map(hash, parts))
            stack += parts
        if met & self._taken:
            raise ValueError("a TorchScript module with a part that something else holds as well")
        self._taken |= met


def restore_later(
    archive: Any, storages: list[Any], outline: list[Any], parameters: list[bool], names: list[str]
) -> Any:
    """Pickle's call on a hit: a module that is compiled when it is first used. Raises nothing then."""
    import torch

    _install(torch.jit.RecursiveScriptModule)
    kind, name, _, children = outline
    if kind:
        return _traced(kind, name, restore_later(archive, storages, children[0][1], parameters, names))
    module = torch.jit.RecursiveScriptModule.__new__(torch.jit.RecursiveScriptModule)
    own = {table: value for table, value in vars(torch.nn.Module()).items() if table not in _OWN}
    vars(module).update(own, _initializing=False)
    vars(module)[PENDING] = (archive, storages, outline, parameters, names)
    return module


def build(module: Any) -> None:
    """Compiles a module that waits for it. Other threads that use it wait."""
    with _lock:
        pending = vars(module).get(PENDING)
        if pending is not None:
            with modes.without_torch_modes():  # the first use may come from anywhere
                compiled = restore(*pending)
            for name, value in vars(compiled).items():
                vars(module).setdefault(name, value)
            del vars(module)[PENDING]


class _OnDemand:
    """Stands in the class where instances have an attribute. No data descriptor: their own comes first."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is not None and PENDING in vars(module):
            build(module)
        if module is not None and self._name in vars(module):
            return vars(module)[self._name]
        raise AttributeError(self._name)


def _install(kind: Any) -> None:
    """Stays after %unload_ext: a module that was restored before may not have been used yet."""
    for name in _LATER:
        if name not in vars(kind):
            setattr(kind, name, _OnDemand(name))


def restore(archive: Any, storages: list[Any], outline: list[Any], parameters: list[bool], names: list[str]) -> Any:
    """Pickle's call on a hit."""
    import torch

    compiled = compile_archive(archive, storages, names)
    for tensor, is_parameter in zip(_parameters(compiled), parameters, strict=False):
        if is_parameter:
            tensor.__class__ = torch.nn.Parameter
    return _wrap(compiled, outline)


def compile_archive(archive: Any, storages: list[Any], names: Sequence[str] = ()) -> Any:
    """The compiled module (torch._C.ScriptModule) of an archive, over these storages, which it knows by `names`;
    without any by what write_archive() calls them."""
    import torch

    context = torch._C.DeserializationStorageContext()
    names = names or [f"{index}.storage" for index in range(len(storages))]
    for name, storage in zip(names, storages, strict=True):
        context.add_storage(name, torch.empty(0, dtype=torch.uint8).set_(storage))
    reader = torch._C.PyTorchFileReader(io.BytesIO(archive))
    unit = torch._C.CompilationUnit()
    return torch._C._import_ir_module_from_package(unit, reader, context, None, "0")


def write_archive(compiled: Any, storages: list[Any]) -> bytes:
    """Code, attributes and small constants; a tensor on one of `storages` is written as that storage's number."""
    import torch

    file = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(file)
    # Without it the archive says that it is of an old torch, and its operators are read as they were then: a division
    # of integers truncates.
    writer.set_min_version(torch._C._get_max_operator_version())
    serializer = torch._C.ScriptModuleSerializer(writer)
    context = serializer.storage_context()
    for index, storage in enumerate(storages):
        if context.get_or_add_storage(storage) != index:
            raise ValueError("a TorchScript module whose storages torch numbers in another way")
    serializer.serialize(compiled, 0)
    serializer.write_files()
    writer.write_end_of_file()
    return file.getvalue()


def _parameters(compiled: Any) -> Iterator[Any]:
    """All parameters, in an order that the archive keeps."""
    from torch._C import ModuleDict, ParameterDict

    for _, tensor in items(ParameterDict(compiled)):
        yield tensor
    for _, part in items(ModuleDict(compiled)):
        yield from _parameters(part)


def items(table: Any) -> Any:
    """torch's tables of a module's parts; its stubs do not know their methods."""
    return table.items()


def constants(graph: Any) -> Iterator[Any]:
    """The tensors that a graph holds: of a frozen module all weights, and small ones."""
    for node in graph.findAllNodes("prim::Constant"):
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            yield node.t("value")


def is_big(tensor: Any) -> bool:
    """Whether a constant of a graph lies out of the archive, as a storage."""
    return bool(tensor.numel() * tensor.element_size() >= _BIG)


def refuse_lost_state(tensor: Any) -> None:
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise ValueError(f"a TorchScript module with a {type(tensor).__qualname__}")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ValueError(f"a TorchScript module with a tensor on {tensor.device}, {tensor.layout}")
    if tensor.grad is not None or tensor.grad_fn is not None or tensor._backward_hooks or tensor.__dict__:
        raise ValueError("a TorchScript module with a tensor that has a gradient, hooks or attributes")
    if tensor.is_inference():
        raise ValueError("a TorchScript module with a tensor made in inference mode")


def _outline(module: Any) -> list[Any]:
    """The Python objects round the compiled ones, as _wrap() makes them: [kind, name, has a type, children]."""
    build(module)
    own = vars(module)
    traced = (type(module).__module__, type(module).__qualname__)
    if traced in _TRACED:
        _refuse_parts(module, own.keys() - _tables() - {"_name", "_actual_script_module", "_initializing"})
        return [_TRACED.index(traced) + 1, own["_name"], False, [["", _outline(own["_actual_script_module"])]]]
    if traced != _SCRIPTED:
        raise ValueError(f"a TorchScript module of class {type(module).__qualname__}")
    _refuse_parts(module, [name for name in own.keys() - _tables() - _OWN if not _is_method(own[name])])
    children = [[name, _outline(part)] for name, part in own["_modules"].items()]
    return [0, "", "_concrete_type" in own, children]


def _tables() -> set[str]:
    import torch

    return set(vars(torch.nn.Module())) - _OWN


def _refuse_parts(module: Any, extra: Any) -> None:
    own = vars(module)
    hooks = [name for name in _tables() & own.keys() if own[name]]
    names = sorted([*extra, *hooks])
    if names:
        raise ValueError(f"a TorchScript module with Python parts of its own ({', '.join(names)})")


def _is_method(value: Any) -> bool:
    """A compiled method that was asked for before: it is only remembered."""
    return type(value).__qualname__ == "ScriptMethod"


def _is_tensor(item: Any) -> bool:
    import torch

    return isinstance(item, torch.Tensor)


def _traced(kind: int, name: str, inner: Any) -> Any:
    """What torch.jit.trace puts round a module that it traced."""
    import torch
    from torch.jit import _trace

    traced: Any = (_trace.TracedModule, _trace.TopLevelTracedModule)[kind - 1]
    module = traced.__new__(traced)
    torch.nn.Module.__init__(module)
    vars(module).update(_name=name, _actual_script_module=inner)
    for table in ("_parameters", "_buffers", "_modules", "training"):
        del vars(module)[table]
    return module


def _uses_libraries(archive: bytes) -> bool:
    import torch

    reader = torch._C.PyTorchFileReader(io.BytesIO(archive))
    code = (reader.get_record(name) for name in reader.get_all_records() if name.endswith(".py"))
    return any(map(_FOREIGN.search, code))


def _wrap(compiled: Any, outline: list[Any]) -> Any:
    """As torch.jit._recursive.wrap_cpp_module, with the classes that the module had."""
    import torch

    kind, name, has_type, children = outline
    if kind:
        return _traced(kind, name, _wrap(compiled, children[0][1]))
    parts = dict(items(torch._C.ModuleDict(compiled)))

    def fill(module: Any) -> None:
        for child, inner in children:
            setattr(module, child, _wrap(parts[child], inner))
        if has_type:
            module._concrete_type = torch._C.ConcreteModuleType.from_jit_type(compiled._type())

    return torch.jit.RecursiveScriptModule._construct(compiled, fill)
