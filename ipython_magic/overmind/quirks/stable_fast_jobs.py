# SPDX-License-Identifier: MIT
"""stable-fast's traces as loads: `compile` only wraps, natively each time; what a wrapper traces is a load of its own.

sfast traces when a wrapper is first called with a new kind of inputs (its own table of traces does not look at
shapes). Here a trace is asked for by the module as it is (module_facts.py), the inputs without their numbers, the
options of sfast's compiler, and what Overmind puts into every key. Numbers matter only to a trace whose code reads
them, and that one is not kept (quirks/traced_reads.py). So it does not matter where a module comes from or what its
weights are: they stay the module's own. If the parameters are frozen too (preserve_parameters=False), their content is
in the key.

sfast (1.0.5) hands two things of the wrapper's making to every trace: `check_trace`, to torch.jit.trace, and
`ts_compiler`, to finish with. A _Job is both.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from overmind.encoding import Uncacheable
from overmind.loader import BoundCall, Loader
from overmind.module_facts import Facts
from overmind.patching import PatchSet
from overmind.quirks import stable_fast, traced_reads

_COMPILER = "sfast.compilers.diffusion_pipeline_compiler"
_WRAPPERS = {
    "forward": ("/sfast/jit/trace_helper.py", "wrapper"),
    "_call_impl": ("/sfast/hooks/module_jit_hook.py", "compiled_call_impl"),
}

_local = threading.local()


class _Job:
    """How one wrapper traces. Falsy if its traces are not checked; called, it finishes a trace."""

    def __init__(self, compiler: functools.partial[Any], check_trace: bool) -> None:
        self.compiler = compiler
        self._check_trace = check_trace

    def __bool__(self) -> bool:
        return self._check_trace

    def __call__(self, module: Any, inputs: Any) -> Any:
        finished = getattr(_local, "finished", None)
        _local.finished = None
        return module if finished is not None and finished() is module else self.compiler(module, inputs)


class _Work:
    """One trace: what it is asked for by, and how it is made. On one thread."""

    def __init__(self, native: Callable[..., Any], func: Any, args: Any, kwargs: Any, options: dict[str, Any]) -> None:
        self._native = native
        self._func = func
        self._inputs = (args, kwargs)
        self._options = options
        self._job: _Job = options["check_trace"]
        self.name = "?"
        self.refusal: str | None = None
        self.asked: tuple[bytes, list[Any], tuple[Any, ...]] = (b"", [], ())
        try:
            self.asked = self._ask()
        except Uncacheable as refusal:
            self.refusal = str(refusal)
        except Exception as error:
            self.refusal = f"the module could not be described ({type(error).__name__}: {error})"

    def _ask(self) -> tuple[bytes, list[Any], tuple[Any, ...]]:
        """(fingerprint, tensors of the module, classes and functions)"""
        module, method = self._func.module, self._func.func
        name = getattr(method, "__name__", "?")
        self.name = f"{type(module).__qualname__}.{name}"
        if getattr(method, "__self__", None) is not module or module is None:
            raise Uncacheable(f"{self.name} is no method of a module")
        if getattr(type(module), name, None) is not getattr(method, "__func__", method):
            raise Uncacheable(f"{self.name} was replaced")
        options = dict(self._job.compiler.keywords)
        modify = options.pop("modify_model_fn")
        if modify.keywords.get("enable_triton"):
            raise Uncacheable("enable_triton=True: operators for CUDA devices are not tested")
        facts = Facts(_is_wrapper)
        facts.argument("module", module)
        inputs = Facts()
        inputs.argument("inputs", self._inputs)
        facts.parts += inputs.parts
        facts.argument("method", name)
        facts.argument("compiler", (options, dict(modify.keywords), bool(self._job)))
        facts.argument("options", {name: value for name, value in self._options.items() if name != "check_trace"})
        frozen = set() if options.get("preserve_parameters") is False else set(map(id, facts.parameters))
        contents = [tensor for tensor in facts.tensors if id(tensor) not in frozen]
        return facts.fingerprint(contents), facts.tensors, (*facts.kinds, *inputs.kinds)

    def make(self) -> stable_fast.Trace:
        """The native trace, finished; ready to be kept unless it says why not."""
        if self.refusal is not None:
            return stable_fast.Trace(self._trace(lambda _module: None))
        reads = traced_reads.Reads(self._values())
        shapes: list[bool] = []
        with stable_fast.hooks_put_off() as catch_up:
            with traced_reads.watched(reads):
                module = self._trace(lambda traced: shapes.append(traced_reads.dynamic(traced)))
            trace = stable_fast.Trace(module)
            try:
                trace.refusal = self._refusal(reads, shapes)
                if trace.refusal is None:
                    trace.take(self.asked[1])
            except Exception as error:
                trace.refusal = str(error).strip().partition("\n")[0] or type(error).__name__
            catch_up()
        return trace

    def _refusal(self, reads: traced_reads.Reads, shapes: list[bool]) -> str | None:
        if reads.refusal is not None:
            return reads.refusal
        if any(shapes):
            return "a trace with sizes that depend on the values of its inputs"
        try:
            same = self._ask()[0] == self.asked[0]
        except Uncacheable:  # what was added can't even be described: a hook that is a closure
            same = False
        return None if same else "a trace that changed its module"

    def _trace(self, look: Callable[[Any], None]) -> Any:
        """As lazy_trace() and AutoTraceCompiler.compile() do it."""
        traced, helper = self._native(self._func, *self._inputs, **{**self._options, "check_trace": bool(self._job)})
        look(traced)
        return self._job.compiler(traced, helper(traced).convert_inputs(*self._inputs))

    def _values(self) -> list[bool]:
        """Which of the flat inputs are tensors of the caller's."""
        from sfast.utils import flat_tensors

        own: set[int] = set()
        _collect_tensors(self._inputs, own)
        return [id(tensor) in own for tensor in flat_tensors.flattern(self._inputs)]


def make_trace(name: str, fingerprint: bytes, kinds: tuple[Any, ...]) -> stable_fast.Trace:
    """What is loaded: the trace that this thread is at work on."""
    return _local.work.make()  # type: ignore[no-any-return]


def _refuse(_call: BoundCall) -> str | None:
    work: _Work = _local.work
    return work.refusal


TRACE = Loader(name="sfast.jit.trace_helper.trace_with_kwargs", libraries=("sfast", "torch"), refuse=_refuse)


def _trace_with_kwargs(patches: PatchSet, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def trace_with_kwargs(
        func: Any, example_inputs: Any = None, example_kwarg_inputs: Any = None, **kwargs: Any
    ) -> tuple[Any, Callable[[Any], Any]]:
        if type(kwargs.get("check_trace")) is not _Job or not patches.active or getattr(_local, "work", None):
            return native(func, example_inputs, example_kwarg_inputs, **kwargs)  # type: ignore[no-any-return]
        work = _Work(native, func, tuple(example_inputs or ()), dict(example_kwarg_inputs or {}), kwargs)
        _local.work = work
        try:
            with stable_fast.over(work.asked[1]):
                trace = patches.call(TRACE, make_trace, (work.name, work.asked[0], work.asked[2]))
        finally:
            _local.work = None
        _local.finished = weakref.ref(trace.module)
        from sfast.jit.trace_helper import TracedPosArgOnlyModuleWrapper

        training = func.training
        return trace.module, lambda module: TracedPosArgOnlyModuleWrapper(module, training=training)

    return trace_with_kwargs


def _with_job(native: Callable[..., Any]) -> Callable[..., Any]:
    """For lazy_trace(func, *, ts_compiler=None, **options) and AutoTraceCompiler.__init__ with the same options."""

    @functools.wraps(native)
    def wrapper(*args: Any, ts_compiler: Any = None, **options: Any) -> Any:
        if _is_known(ts_compiler) and type(options.get("check_trace", True)) is bool:
            ts_compiler = options["check_trace"] = _Job(ts_compiler, options.get("check_trace", True))
        return native(*args, ts_compiler=ts_compiler, **options)

    return wrapper


def _wrapping(native: Callable[..., Any]) -> Callable[..., Any]:
    """For `overmind.load(compile, pipe, config)`: called as it is, its traces are what is cached."""

    @functools.wraps(native)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return native(*args, **kwargs)

    vars(wrapper)["__overmind_loader__"] = TRACE
    return wrapper


def _is_known(compiler: Any) -> bool:
    """sfast's own compiler, as its config makes it."""
    module = vars(sys.modules.get(_COMPILER, ModuleType("absent")))
    if type(compiler) is not functools.partial or compiler.func is not module.get("_ts_compiler") or compiler.args:
        return False
    modify = compiler.keywords.get("modify_model_fn")
    return type(modify) is functools.partial and modify.func is module.get("_modify_model") and not modify.args


def _is_wrapper(name: str, value: Any) -> bool:
    """A wrapper of sfast's, in the __dict__ of the module that it wraps."""
    if type(value) is not FunctionType or name not in _WRAPPERS:
        return False
    file, function = _WRAPPERS[name]
    code = value.__code__
    return code.co_name == function and code.co_filename.endswith(file)


def _collect_tensors(value: Any, found: set[int]) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        found.add(id(value))
    elif isinstance(value, (list, tuple)):
        for part in value:
            _collect_tensors(part, found)
    elif isinstance(value, dict):
        for part in value.values():
            _collect_tensors(part, found)


def patch_tracing(patches: PatchSet, module: ModuleType) -> None:
    """When sfast.jit.trace_helper was imported."""
    patches.replace(module, "trace_with_kwargs", functools.partial(_trace_with_kwargs, patches))
    patches.replace(module, "lazy_trace", _with_job)
    patches.replace(module.AutoTraceCompiler, "__init__", _with_job)
    utils = sys.modules["sfast.jit.utils"]
    patches.replace(utils, "attach_script_module_clear_hook", stable_fast.attacher)


def patch_compiler(patches: PatchSet, module: ModuleType) -> None:
    """When sfast's compilers were imported."""
    tracing = sys.modules["sfast.jit.trace_helper"]
    wrapped: Any = vars(tracing).get("lazy_trace")
    patches.share(module, "lazy_trace", getattr(wrapped, "__wrapped__", wrapped), wrapped)
    for name in ("compile", "compile_unet", "compile_vae"):
        patches.replace(module, name, _wrapping)
