# SPDX-License-Identifier: MIT
"""Imports made ahead for a kernel find what they would find in a cell, or are left to the cell."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import wait_for
from kernel_sessions import session
from overmind.kernel import kernelspec
from starts import ENGINES, WARM_SECONDS, forked_session, refused, warm_kernel, zygotes

LIBRARY = "overmind_test_library"


@pytest.fixture(autouse=True)
def profile_of_ipython(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))


def _compared(runtime: Path, folder: Path, engine: str, cell: str) -> None:
    """The cell's messages in a fork are those of a plain start."""
    warm_kernel(runtime, folder, cell, engine)
    with session(kernelspec.argv(engine)) as plain:
        _reply, expected = plain.run(cell)
    wait_for(lambda: bool(zygotes(runtime)), WARM_SECONDS, "a zygote waits")
    for _ in range(2):  # the second is of a zygote that may have learned from the first
        with forked_session(runtime, engine) as running:
            _reply, found = running.run(cell)
        assert [(each["msg_type"], each["content"]) for each in found] == [
            (each["msg_type"], each["content"]) for each in expected
        ]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_shell_runs(runtime: Path, folder: Path, site_packages: Path, engine: str) -> None:
    (site_packages / f"{LIBRARY}.py").write_text(
        "import sys, IPython\nshell = IPython.get_ipython()\n"
        "FOUND = [type(shell).__name__, shell.__class__.__module__, 'IPKernelApp' in shell.config,\n"
        "         isinstance(shell, IPython.core.interactiveshell.InteractiveShell), get_ipython() is shell]\n"
    )
    _compared(runtime, folder, engine, f"import {LIBRARY}\nprint({LIBRARY}.FOUND)")
    assert LIBRARY not in refused(runtime)


@pytest.mark.parametrize("engine", ENGINES)
def test_more_of_the_shell(runtime: Path, folder: Path, site_packages: Path, engine: str) -> None:
    (site_packages / f"{LIBRARY}.py").write_text(
        "import IPython\nIPython.get_ipython().events.register('post_run_cell', lambda *_: print('after a cell'))\n"
    )
    _compared(runtime, folder, engine, f"import {LIBRARY}\nprint(1)")
    assert "events" in refused(runtime)[LIBRARY]


@pytest.mark.parametrize("engine", ENGINES)
def test_targets_of_comms(runtime: Path, folder: Path, site_packages: Path, engine: str) -> None:
    (site_packages / f"{LIBRARY}.py").write_text(
        "import comm\ncomm.get_comm_manager().register_target('of a library', lambda comm, message: print('opened'))\n"
    )
    cell = (
        "import comm\nprint(sorted(comm.get_comm_manager().targets))\n"
        f"import {LIBRARY}\nprint(sorted(comm.get_comm_manager().targets))"
    )
    _compared(runtime, folder, engine, cell)
    assert LIBRARY not in refused(runtime)


def test_what_surrounds_an_import(runtime: Path, folder: Path, site_packages: Path) -> None:
    """A module that silences what another one of its package says."""
    package = site_packages / LIBRARY
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "quiet.py").write_text(
        "import warnings\nwith warnings.catch_warnings():\n"
        f"    warnings.simplefilter('ignore')\n    from {LIBRARY} import loud\n"
    )
    (package / "loud.py").write_text("import warnings\nwarnings.warn('said aloud', FutureWarning)\n")
    _compared(runtime, folder, ENGINES[-1], f"from {LIBRARY} import quiet\nprint(quiet.loud.__name__)")
    assert not [name for name in refused(runtime) if name.startswith(LIBRARY)]
