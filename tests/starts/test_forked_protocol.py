# SPDX-License-Identifier: MIT
"""jupyter_kernel_test, whole, against a kernel that comes from a zygote."""

from __future__ import annotations

from collections.abc import Iterator

import jupyter_kernel_test
import pytest
from conftest import own_runtime
from kernel_samples import Samples
from overmind.kernel import kernelspec
from starts import plain_starts, warm_kernel


@pytest.fixture(scope="module", autouse=True)
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The installed kernelspec, and a zygote; all kernels of this module must be forks of it."""
    with own_runtime() as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        kernelspec.install(user=True)
        warm_kernel(runtime, tmp_path_factory.mktemp("specs"), "import IPython.display", "xeus")
        before = plain_starts(runtime)
        yield
        assert len(before) == 1 and plain_starts(runtime) == before


class KernelTests(Samples, jupyter_kernel_test.KernelTests):
    kernel_name = kernelspec.NAME


del jupyter_kernel_test  # else pytest collects its abstract class, too
