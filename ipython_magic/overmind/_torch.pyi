"""Tensors and storages over a mapping: the only code linked to libtorch.

overmind/skeleton.py uses it when `TORCH_VERSION == torch.__version__`, else overmind/torch_fallback.py, which has
the same two names in Python.
"""

from collections.abc import Callable
from typing import Any, final

TORCH_VERSION: str

@final
class Packer:
    """Collects the tensors and storages met while a skeleton is pickled.

    `packer.persistent_id` is set on a pickle.Pickler. It returns None for everything but
      - a tensor that the fast path takes exactly: type exactly torch.Tensor or torch.nn.Parameter, strided, CPU,
        leaf without grad, no hooks, not conj/neg/quantised/inference/sparse/nested/meta, `__dict__` empty or
        holding only str -> bool/int/float/str/None;
      - torch.UntypedStorage / TypedStorage on the CPU (met when a tensor takes pickle's own way);
      - an object whose id() is in `substitutes`.
    Each gets the next integer, the same one when met again. ValueError for a tensor that neither the fast path nor
    pickle would give back as it is (gradient, grad_fn, hooks, inference mode, not on the CPU, shared memory, ...).
    """

    def __init__(
        self,
        substitutes: dict[int, int],
        inspector_of: Callable[[type], Callable[[Any], object] | None] | None = None,
    ) -> None:
        """`substitutes`: id(object) -> number of the substitute. The caller keeps those objects alive.
        `inspector_of` is asked once for each type other than Tensor, Parameter and the storages; the callable that
        it gives is called with each object of that type when pickle meets it, and raises to refuse it."""
    def persistent_id(self, obj: Any) -> int | None: ...
    def finish(self) -> tuple[bytes, list[tuple[int, int]], list[Any]]:
        """(records for Segment.tensors, buffers as (address, nbytes), objects that keep those addresses alive).
        Call once, after the last dump."""

def build(segment: object, substitutes: list[Any]) -> list[Any]:
    """The list whose __getitem__ is the Unpickler's persistent_load: item i is what persistent id i stood for.

    `segment` is Segment.capsule().
    Tensors get storages of exactly the recorded size and resizability over this process's private pages; storages
    shared before are shared again, and nothing else is. Built outside inference mode and without dispatch, so no
    ambient torch mode touches them. ValueError if the records are malformed."""
