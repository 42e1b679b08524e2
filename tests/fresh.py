# SPDX-License-Identifier: MIT
"""Fresh processes, cheaply: a server with the slow imports done forks one child per run.

A child has everything that a fresh interpreter after `import torch, transformers, diffusers` has, and nothing that
another run left. The server imports only: it runs no tensor operation, so no thread pool is there to be lost in a
fork. Cases that are about import order start a real interpreter instead (`Fresh.interpreter`).

Run as a program it is the server: a JSON request a line on stdin, a JSON reply a line on stdout.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import traceback
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
MARK = "@@overmind@@"

_SLOW_IMPORTS = (
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.controlnets.controlnet",
    "diffusers.pipelines.auto_pipeline",
    "diffusers.pipelines.controlnet.pipeline_controlnet",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.schedulers.scheduling_ddim",
    "safetensors.torch",
    "torch",
    "transformers.models.auto.processing_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.pipelines",
)

# `value` is what the source leaves under that name; `records` are the loads of the run.
_AFTER = """
import json as _json, overmind as _overmind
if {on}:
    assert _overmind.wait_published(120), "not committed"
print({mark!r} + _json.dumps({{
    "value": globals().get("value"),
    "records": [[r.outcome, r.reason, r.loader, r.entry_id, r.nbytes] for r in _overmind.history()],
}}))
"""


@dataclass
class Run:
    """What one process came to."""

    value: Any = None
    records: list[list[Any]] = field(default_factory=list)
    stdout: str = ""
    stderr: str = ""
    returncode: int = 0

    @property
    def outcomes(self) -> list[str]:
        return [record[0] for record in self.records]

    @property
    def reasons(self) -> list[str]:
        return [record[1] for record in self.records]


def _program(source: str, on: bool) -> str:
    before = "import overmind\novermind.enable()\n" if on else ""
    return before + textwrap.dedent(source) + _AFTER.format(on=on, mark=MARK)


def _parse(stdout: str, stderr: str, returncode: int) -> Run:
    run = Run(stdout=stdout, stderr=stderr, returncode=returncode)
    for line in stdout.splitlines():
        if line.startswith(MARK):
            found = json.loads(line[len(MARK) :])
            run.value, run.records = found["value"], found["records"]
    return run


class Fresh:
    """Owner of the server. Not thread-safe: one run at a time."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def close(self) -> None:
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait(20)
            self._server = None

    def run(
        self,
        source: str,
        *,
        on: bool = True,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout: float = 120,
        check: bool = True,
    ) -> Run:
        """Runs `source` in a forked child; with `on`, Overmind is enabled first. `env` is added to this process's."""
        if self._server is None or self._server.poll() is not None:
            # The hub library reads this at its import: a child is too late, and would ask the network for a minute.
            self._server = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={"HF_HUB_OFFLINE": "1", **os.environ},
            )
        assert self._server.stdin is not None and self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            request = {
                "source": _program(source, on),
                "env": {**os.environ, **(env or {})},
                "cwd": cwd or os.getcwd(),
                "out": f"{folder}/out",
                "err": f"{folder}/err",
                "timeout": timeout,
            }
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            reply = json.loads(self._server.stdout.readline())
            run = _parse(Path(request["out"]).read_text(), Path(request["err"]).read_text(), reply["returncode"])
        return _checked(run, check)

    def interpreter(
        self,
        source: str,
        *,
        on: bool = True,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout: float = 120,
        check: bool = True,
    ) -> Run:
        """The same in a new interpreter that has imported nothing."""
        done = subprocess.run(
            [sys.executable, "-c", _program(source, on)],
            env={**os.environ, "PYTHONPATH": _python_path(), **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return _checked(_parse(done.stdout, done.stderr, done.returncode), check)


def _checked(run: Run, check: bool) -> Run:
    if check and run.returncode != 0:
        raise AssertionError(f"the run ended with {run.returncode}:\n{run.stdout}\n{run.stderr}")
    return run


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))


# --- the server ---------------------------------------------------------------------------------


def _preload() -> None:
    for name in _SLOW_IMPORTS:
        with contextlib.suppress(ModuleNotFoundError):  # older versions lack some
            importlib.import_module(name)


def _child(request: dict[str, Any]) -> int:
    for stream, name in ((1, "out"), (2, "err")):
        opened = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, stream)
        os.close(opened)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path.insert(0, "")
    import signal

    signal.alarm(int(request["timeout"]))
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        exec(compile(request["source"], "<run>", "exec"), main.__dict__)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _serve() -> None:
    sys.path.insert(0, str(TESTS))
    _preload()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing a library prints may mix with the replies
    child_code = _child
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin:
            request = json.loads(line)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = child_code(request)
                finally:
                    os._exit(code)
            _pid, status = os.waitpid(child, 0)
            replies.write(json.dumps({"returncode": os.waitstatus_to_exitcode(status)}) + "\n")
            replies.flush()


if __name__ == "__main__":
    _serve()
