# SPDX-License-Identifier: MIT
"""jupyter_kernel_test, whole, against the installed kernelspec."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import jupyter_kernel_test
import pytest
from kernel_samples import Samples
from overmind.kernel import kernelspec


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    """The kernelspec in a folder of this test's own, and a fresh IPython profile: history starts empty."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", folder)
        patch.setenv("IPYTHONDIR", str(Path(folder, "ipython")))
        patch.setenv("OVERMIND_ZYGOTE", "0")
        kernelspec.install(user=True)
        yield


class KernelTests(Samples, jupyter_kernel_test.KernelTests):
    kernel_name = kernelspec.NAME


del jupyter_kernel_test  # else pytest collects its abstract class, too
