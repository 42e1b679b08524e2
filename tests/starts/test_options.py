# SPDX-License-Identifier: MIT
"""Options of IPython's in a kernelspec that a user edited hold in a fork as they do in a kernel started by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import wait_for
from kernel_sessions import Session, ipykernel, session
from overmind.kernel import kernelspec
from starts import ENGINES, WARM_SECONDS, caught_up, forked_session, plain_starts, warm_kernel

NATIVE = {"xeus": [sys.executable, "-m", "overmind.kernel", "-f", "{connection_file}"], "ipykernel": ipykernel()}

OPTIONS = [
    "--InteractiveShell.colors=NoColor",
    "--InteractiveShell.ast_node_interactivity=all",
    "--HistoryManager.enabled=False",
    "--IPKernelApp.matplotlib=inline",
    "--profile=overmind-test",
    "--c=chosen = 41",
]

CELL = """
import sys
from traitlets.config import Application
shell, app = get_ipython(), Application.instance()
print(shell.colors, shell.ast_node_interactivity, shell.history_manager.enabled, shell.profile, globals().get("chosen"))
print(app.matplotlib, "matplotlib" in sys.modules, globals().get("configured"), sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def profiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython's folder, with a configuration in a profile that is not the usual one."""
    own = folder / "ipython" / "profile_overmind-test"
    own.mkdir(parents=True)
    (own / "ipython_config.py").write_text("c.InteractiveShellApp.exec_lines = ['configured = True']\n")
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))


def _edited(argv: list[str], where: str) -> list[str]:
    """With the options behind or before `-f FILE`, or with the file named in another way."""
    *command, flag, file = argv
    if where == "behind":
        return [*command, flag, file, *OPTIONS]
    if where == "before":
        return [*command, *OPTIONS, flag, file]
    return [*command, f"--IPKernelApp.connection_file={file}", *OPTIONS]


def _told(running: Session) -> list[str]:
    """What the kernel says of its options, but the name of its connection file."""
    file = str(running.manager.connection_file)
    return running.text(CELL).replace(file, "FILE").splitlines()


@pytest.mark.parametrize("engine", ENGINES)
def test_options(runtime: Path, folder: Path, engine: str) -> None:
    warm_kernel(runtime, folder, "1", engine)
    for where in ("behind", "before", "otherwise"):
        with session(_edited(NATIVE[engine], where)) as running:
            expected = _told(running)
        assert expected[0].split()[1:] == ["all", "False", "overmind-test", "41"], expected
        assert expected[1].startswith("inline True True"), expected
        wait_for(lambda: caught_up(runtime), WARM_SECONDS, "the zygote has what the last kernel imported")
        before = plain_starts(runtime)
        with session(_edited(kernelspec.argv(engine), where), zygote=True) as running:
            assert _told(running) == expected
        assert plain_starts(runtime) == before, "the options cost the fork"
        with session(_edited(kernelspec.argv(engine), where)) as running:  # a plain start by the launcher
            assert _told(running) == expected
    wait_for(lambda: caught_up(runtime), WARM_SECONDS, "the zygote waits")
    with forked_session(runtime, engine) as running:  # of the same zygote, as ever
        usual = _told(running)
    assert usual[0].split()[1:] == ["last_expr", "True", "default", "None"], usual


@pytest.mark.parametrize("engine", ENGINES)
def test_options_that_are_wrong(runtime: Path, folder: Path, engine: str) -> None:
    """The kernel ends as one started by hand, and says why; the zygote stays."""
    warm_kernel(runtime, folder, "1", engine)
    before = plain_starts(runtime)
    wrong = ["--HistoryManager.enabled=perhaps"]
    found = []
    for argv in (NATIVE[engine], kernelspec.argv(engine)):
        command = [word.replace("{connection_file}", str(folder / "c.json")) for word in (*argv, *wrong)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        found.append((done.returncode, "perhaps" in done.stderr))
    assert found[0] == found[1] and found[0][0] != 0, found
    assert plain_starts(runtime) == before
