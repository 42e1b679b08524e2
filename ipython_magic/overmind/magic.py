# SPDX-License-Identifier: MIT
"""%overmind and %%overmind: parse and print. The work is in commands.py."""

from __future__ import annotations

import ast
import inspect
import shlex
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, magics_class, no_var_expand
from IPython.display import display

from overmind import _core, commands, records
from overmind import display as shown

_USAGE = """%overmind                        a summary
%overmind start [--idle-exit S]  start the daemon (the first load does it too)
%overmind stop                   end it and the zygotes; everything it holds is given up
%overmind status                 whether it runs, and where; the zygotes
%overmind list                   the entries
%overmind stats                  memory, hit rate, seconds saved
%overmind why [N]                the last N loads of this kernel, and why each was no hit (10)
%overmind drop ID... | --all | --stale
%overmind pin ID, unpin ID       keep an entry from being evicted
%overmind monitor [--seconds S]  events as they happen, until the kernel is interrupted
%overmind doctor                 check this machine
%%overmind                       run the cell, then show what it loaded"""


@magics_class
class OvermindMagics(Magics):  # type: ignore[misc]
    """Registered by `install`, removed by `uninstall`: nothing stays behind."""

    _NAME = "overmind"

    @classmethod
    def install(cls, ip: Any) -> None:
        """Adds %overmind and %%overmind to this shell. Idempotent."""
        if cls._NAME in ip.magics_manager.registry:
            return
        magics = cls(ip)
        ip.magics_manager.registry[cls._NAME] = magics
        ip.register_magic_function(magics.line, "line", cls._NAME)
        ip.register_magic_function(magics.cell, "cell", cls._NAME)

    @classmethod
    def uninstall(cls, ip: Any) -> None:
        """Removes what `install` added, and nothing that somebody else put there since. Idempotent."""
        magics = ip.magics_manager.registry.pop(cls._NAME, None)
        if magics is None:
            return
        for kind, method in (("line", magics.line), ("cell", magics.cell)):
            if ip.magics_manager.magics[kind].get(cls._NAME) == method:
                del ip.magics_manager.magics[kind][cls._NAME]

    def line(self, line: str) -> None:
        """%overmind [verb]: see `%overmind help`."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"%overmind: {error}") from None
        verb, *rest = words or ["summary"]
        if verb in ("-h", "--help"):
            verb = "help"
        action = _VERBS.get(verb)
        if action is None:
            raise UsageError(f"%overmind {verb}: no such verb\n{_USAGE}")
        try:
            action(rest)
        except commands.CommandError as error:
            raise UsageError(f"%overmind {verb}: {error}") from None
        except _core.OvermindError as error:
            print(f"overmind: {error}")

    @no_var_expand  # type: ignore[untyped-decorator]
    def cell(self, line: str, cell: str) -> Any:
        """%%overmind: run the cell, then show what it loaded."""
        if line.strip():
            raise UsageError("%%overmind takes no arguments; it runs the cell and shows what it loaded")
        before = int(records.totals()["loads"])
        try:
            return _run(self.shell, cell)
        finally:
            made = int(records.totals()["loads"]) - before
            rows = [asdict(record) for record in records.history()[-made:]] if made else []
            print(shown.records_text(rows) if rows else "overmind: the cell loaded nothing that is watched")


def _run(shell: Any, cell: str) -> Any:
    """Runs the cell in the user's namespace as %%time does: its errors are the cell's own, its last expression the
    result."""
    name = shell.compile.cache(cell)
    tree = shell.transform_ast(shell.compile.ast_parse(shell.transform_cell(cell), filename=name))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    body = _compiled(shell, tree, name, "exec")
    exec(body, shell.user_ns)
    if last is None:
        return None
    return eval(_compiled(shell, ast.Expression(last.value), name, "eval"), shell.user_ns)


def _compiled(shell: Any, tree: ast.AST, name: str, mode: str) -> Any:
    code = shell.compile(tree, name, mode)
    if code.co_flags & inspect.CO_COROUTINE:
        raise UsageError("%%overmind can't run a cell with a top-level await; use %overmind why after it")
    return code


# --- verbs: parse `rest`, call, print ---------------------------------------------------------------


def _none(rest: list[str]) -> None:
    if rest:
        raise commands.CommandError(f"unexpected {' '.join(rest)!r}")


def _option(rest: list[str], name: str) -> float | None:
    """The value of `--name VALUE`, the only thing that may stand there."""
    if not rest:
        return None
    words = rest[0].split("=", 1) if len(rest) == 1 else rest
    if len(words) != 2 or words[0] != name:
        raise commands.CommandError(f"unexpected {' '.join(rest)!r}; only {name} SECONDS is known")
    try:
        return float(words[1])
    except ValueError:
        raise commands.CommandError(f"{name} takes a number of seconds, not {words[1]!r}") from None


def _summary(rest: list[str]) -> None:
    _none(rest)
    from overmind import extension

    reason = extension.wrong_settings()
    if reason is not None:
        print(f"overmind is off: loads are native: {reason}")
        return
    state = "on" if extension.enabled() else "off: loads are native"
    print(f"overmind is {state}")
    found = commands.stats()
    print(shown.stats_text({**found, "entries": found["entries"][:5]}))
    if len(found["entries"]) > 5:
        print(f"... and {len(found['entries']) - 5} more: %overmind list")


def _start(rest: list[str]) -> None:
    print(shown.status_text(commands.start(_option(rest, "--idle-exit"))))


def _stop(rest: list[str]) -> None:
    _none(rest)
    print(shown.stop_text(commands.stop()))


def _status(rest: list[str]) -> None:
    _none(rest)
    print(shown.status_text(commands.status()))


def _list(rest: list[str]) -> None:
    _none(rest)
    print(shown.entries_text(commands.entries()))


def _stats(rest: list[str]) -> None:
    _none(rest)
    display(shown.Stats(commands.stats()))


def _why(rest: list[str]) -> None:
    if len(rest) > 1 or not all(word.isdecimal() for word in rest):
        raise commands.CommandError("it takes one number, of loads to show")
    print(shown.records_text(commands.why(int(rest[0]) if rest else 10)))


def _drop(rest: list[str]) -> None:
    if rest == ["--all"]:
        print(f"{commands.drop_all()} entries dropped")
    elif rest == ["--stale"]:
        lines = [f"{name} dropped: {shown.clean(reason)}" for name, reason in commands.drop_stale().items()]
        print("\n".join(lines) or "none is stale")
    elif not rest or any(word.startswith("-") for word in rest):
        raise commands.CommandError("it takes ids, or --all, or --stale, and only one of these")
    else:
        print("\n".join(f"{name} dropped" for name in commands.drop(rest)))


def _pin(rest: list[str], pinned: bool = True) -> None:
    if len(rest) != 1:
        raise commands.CommandError("it takes one id")
    print(f"{commands.pin(rest[0], pinned)} {'pinned' if pinned else 'unpinned'}")


def _unpin(rest: list[str]) -> None:
    _pin(rest, pinned=False)


def _monitor(rest: list[str]) -> None:
    from overmind import monitor

    try:
        for event in monitor.events(_option(rest, "--seconds")):
            print(shown.event_text(event), flush=True)
    except KeyboardInterrupt:
        print("no longer watching")


def _doctor(rest: list[str]) -> None:
    _none(rest)
    from overmind import doctor

    print(doctor.text(doctor.examine()))


def _help(rest: list[str]) -> None:
    _none(rest)
    print(_USAGE)


_VERBS: dict[str, Callable[[list[str]], None]] = {
    "summary": _summary,
    "start": _start,
    "stop": _stop,
    "status": _status,
    "list": _list,
    "stats": _stats,
    "why": _why,
    "drop": _drop,
    "pin": _pin,
    "unpin": _unpin,
    "monitor": _monitor,
    "doctor": _doctor,
    "help": _help,
}
