# SPDX-License-Identifier: MIT
"""Building a result as if no mode of torch were on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def without_torch_modes() -> Iterator[None]:
    """Rebuild functions are ordinary torch code: inference mode, device contexts and dispatch modes
    would change them."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch._C._len_torch_dispatch_stack() > 0:
            stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        for _ in range(torch._C._len_torch_function_stack()):
            stack.callback(torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack())
        yield
