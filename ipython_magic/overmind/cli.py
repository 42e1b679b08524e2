# SPDX-License-Identifier: MIT
"""The `overmind` command: the verbs of %overmind for a terminal. Parse and print; the work is in commands.py.

Exit status: 0 done, 1 it could not be done (or `doctor` found something wrong), 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

try:
    from overmind import _core, commands, launch
except ImportError as error:
    sys.exit(f"overmind: its compiled part can't be imported ({error}); reinstall overmind-jupyter for this Python")
from overmind import display as shown
from overmind.kernel import NAME


def _safely(function: Callable[..., None]) -> Callable[..., None]:
    """Errors that a user can understand become one line on stderr and the exit status."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except commands.CommandError as error:
            raise click.UsageError(str(error)) from None
        except _core.OvermindError as error:
            raise click.ClickException(str(error)) from None

    return run


def _json_option(function: Callable[..., None]) -> Callable[..., None]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def _print(value: Any, text: str, as_json: bool) -> None:
    click.echo(json.dumps(value, indent=2, sort_keys=True) if as_json else text)


class _Verbs(click.Group):
    """Output that can't be written (a full disk) is one line on stderr and status 1, whichever verb it was of."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            try:
                return super().main(*args, **extra)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # here, where something can be said about it, and not at the interpreter's end
        except OSError as error:
            _close_stdout()
            where = "can't write the output" if error.filename is None else str(error.filename)
            with contextlib.suppress(OSError, AttributeError):
                if error.errno != errno.EPIPE:  # who reads no more needs no word
                    print(f"overmind: {where}: {error.strerror or error}", file=sys.stderr, flush=True)
            sys.exit(1)


def _close_stdout() -> None:
    """What is still in its buffer goes nowhere, and the interpreter does not try again when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_core.__version__, prog_name="overmind")
def main() -> None:
    """Models that survive a kernel restart: look at the store, and manage it."""


@main.command()
@click.option("--idle-exit", type=click.FloatRange(min=0), metavar="SECONDS", help="End when nobody used it so long.")
@_json_option
@_safely
def start(idle_exit: float | None, as_json: bool) -> None:
    """Start the daemon, if none runs. The first load does it too."""
    found = commands.start(idle_exit)
    _print(found, shown.status_text(found), as_json)
    if not found["running"]:
        sys.exit(1)


@main.command()
@_json_option
@_safely
def stop(as_json: bool) -> None:
    """End the daemon and the zygotes. What the daemon holds is given up; kernels go on and keep what they loaded."""
    found = commands.stop()
    _print(found, shown.stop_text(found), as_json)


@main.command()
@_json_option
@_safely
def status(as_json: bool) -> None:
    """Whether a daemon runs, and where; the zygotes. Exit status 1 if no daemon runs."""
    found = commands.status()
    _print(found, shown.status_text(found), as_json)
    if not found["running"]:
        sys.exit(1)


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENT]...")
def run(words: tuple[str, ...]) -> None:
    """Run a script, or `-m MODULE`, as `python` does: with its imports done already, and loads from the store."""
    if not words:
        raise click.UsageError("give a script, or -m and a module")
    if words == ("-m",):
        raise click.UsageError("argument expected for -m: the name of a module")
    launch.run(list(words))


@main.command("list")
@_json_option
@_safely
def list_entries(as_json: bool) -> None:
    """The entries, the one used last first."""
    rows = commands.entries()
    _print(rows, shown.entries_text(rows), as_json)


@main.command()
@_json_option
@_safely
def stats(as_json: bool) -> None:
    """Memory, hit rate, what the hits stood for, and the entries."""
    found = commands.stats(here=False)
    _print(found, shown.stats_text(found), as_json)


@main.command()
@click.argument("count", type=click.IntRange(min=1), default=10, metavar="[N]")
@_json_option
@_safely
def why(count: int, as_json: bool) -> None:
    """The last N loads of all your processes, newest first, and why each was no hit."""
    rows = commands.why(count, here=False)
    _print(rows, shown.records_text(rows), as_json)


@main.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", "everything", is_flag=True, help="Every entry.")
@click.option("--stale", is_flag=True, help="Entries whose files have changed.")
@_json_option
@_safely
def drop(ids: tuple[str, ...], everything: bool, stale: bool, as_json: bool) -> None:
    """Drop entries by ID (or its beginning), all, or the stale ones."""
    if bool(ids) + everything + stale != 1:
        raise click.UsageError("give ids, or --all, or --stale, and only one of these")
    if everything:
        count = commands.drop_all()
        _print({"dropped": count}, f"{count} entries dropped", as_json)
    elif stale:
        reasons = commands.drop_stale()
        lines = [f"{name} dropped: {shown.clean(reason)}" for name, reason in reasons.items()]
        _print({"dropped": len(reasons), "reasons": reasons}, "\n".join(lines) or "none is stale", as_json)
    else:
        dropped = commands.drop(list(ids))
        _print({"dropped": len(dropped), "ids": dropped}, "\n".join(f"{name} dropped" for name in dropped), as_json)


def _pin(text: str, pinned: bool, as_json: bool) -> None:
    entry_id = commands.pin(text, pinned)
    _print({"id": entry_id, "pinned": pinned}, f"{entry_id} {'pinned' if pinned else 'unpinned'}", as_json)


@main.command()
@click.argument("entry_id", metavar="ID")
@_json_option
@_safely
def pin(entry_id: str, as_json: bool) -> None:
    """Keep an entry from being evicted."""
    _pin(entry_id, True, as_json)


@main.command()
@click.argument("entry_id", metavar="ID")
@_json_option
@_safely
def unpin(entry_id: str, as_json: bool) -> None:
    """Let a pinned entry be evicted again."""
    _pin(entry_id, False, as_json)


@main.command()
@click.option("--seconds", type=click.FloatRange(min=0), help="Stop after so long; otherwise Ctrl-C ends it.")
@_json_option
@_safely
def monitor(seconds: float | None, as_json: bool) -> None:
    """Events as they happen, one a line, until Ctrl-C or the end of the daemon."""
    from overmind import monitor as watching

    try:
        for event in watching.events(seconds):
            click.echo(json.dumps(event) if as_json else shown.event_text(event))
    except KeyboardInterrupt:
        return


@main.command()
@_json_option
@_safely
def doctor(as_json: bool) -> None:
    """Check this machine and say what to do. Exit status 1 if something is wrong."""
    from overmind import doctor as examiner

    checks = examiner.examine()
    _print(examiner.as_json(checks), examiner.text(checks), as_json)
    if not examiner.healthy(checks):
        sys.exit(1)


@main.group()
def kernel() -> None:
    """The Jupyter kernel "Python 3 (Overmind)": install it where Jupyter finds it."""


def _kernelspec(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        from overmind.kernel.kernelspec import KernelspecError

        try:
            function(*args, **kwargs)
        except KernelspecError as error:
            raise click.ClickException(str(error)) from None

    return run


@kernel.command("install")
@click.option("--user", is_flag=True, help="For this user, whatever environment Jupyter runs in.")
@click.option("--sys-prefix", is_flag=True, help="Into this environment (the default in a virtual one).")
@click.option(
    "--engine",
    type=click.Choice(["xeus", "ipykernel"]),
    default="xeus",
    show_default=True,
    help="Our own kernel, or an ipykernel that starts as fast.",
)
@click.option("--name", help=f"Name of the kernelspec; {NAME} if not given, for ipykernel {NAME}-ipykernel.")
@click.option("--display-name", help="Name that frontends show.")
@_json_option
@_kernelspec
def kernel_install(
    user: bool, sys_prefix: bool, engine: str, name: str | None, display_name: str | None, as_json: bool
) -> None:
    """Install the kernel, or refresh it."""
    from overmind.kernel import kernelspec

    name, folder = kernelspec.install(name, engine=engine, user=user, sys_prefix=sys_prefix, display_name=display_name)
    _print({"name": name, "folder": str(folder)}, f"{name} installed in {folder}", as_json)


@kernel.command("list")
@_json_option
@_kernelspec
def kernel_list(as_json: bool) -> None:
    """The installed kernelspecs of Overmind."""
    from overmind.kernel import kernelspec

    found = {name: str(folder) for name, folder in kernelspec.installed().items()}
    text = "\n".join(f"{name}  {folder}" for name, folder in found.items())
    _print(found, text or "none; `overmind kernel install` makes one", as_json)


@kernel.command("remove")
@click.argument("name", default=NAME)
@_json_option
@_kernelspec
def kernel_remove(name: str, as_json: bool) -> None:
    """Remove a kernelspec of Overmind."""
    from overmind.kernel import kernelspec

    folder = kernelspec.remove(name)
    _print({"name": name, "folder": str(folder)}, f"{name} removed from {folder}", as_json)


if __name__ == "__main__":
    main()
