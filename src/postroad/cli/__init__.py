"""The command line: one file per command group, each with `register(app)`.

A failure is one line on stderr that says what to do. Exit codes: 0 done, 1 failed, 2 asked wrongly (a flag,
a topic, a condition), 70 a bug of ours, 130 interrupted, 141 nobody reads the output any more. Commands
import what they need when they run, so that `postroad --help` and completion stay quick.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from typing import Annotated, Final

import typer

from postroad.cli import (
    backup,
    bench,
    cache,
    certs,
    clients,
    context,
    demo,
    discover,
    doctor,
    inbox,
    lab,
    page,
    pipeline,
    plan,
    pub,
    queues,
    send,
    sim,
    status,
    sub,
    subs,
    top,
    trace,
    up,
)
from postroad.cli.examples import add_examples
from postroad.errors import BugError, PostroadError, UsageError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_BUG: Final = 70
EXIT_INTERRUPTED: Final = 130
EXIT_UNREAD: Final = 141  # what a shell reports of a program that SIGPIPE ended

app = typer.Typer(
    name="postroad",
    help="Messaging that knows where every message went.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_GROUPS: Final = (
    *(up, pub, sub, cache, subs, send, inbox, queues, trace, status, clients, discover),
    *(doctor, top, backup, context, certs, demo, page, plan, pipeline, sim, bench, lab),
)
for _group in _GROUPS:
    _group.register(app)
add_examples(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"postroad {version('postroad')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Messaging that knows where every message went."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    _open_closed_descriptors()
    warnings.showwarning = lambda message, *_place, **_more: _warn(message)
    try:
        code = app(arguments, prog_name="postroad", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _unread()
    except SystemExit as exit_:
        if not isinstance(exit_.__context__, BrokenPipeError):  # typer makes this of that one
            raise
        return _unread()
    except PostroadError as error:
        return _complain(str(error), _code(error))
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _complain("the output could not be written: no space is left", EXIT_FAILED)
        describe = getattr(error, "format_message", None)  # typer's own errors, whichever click it brings
        if describe is None:
            traceback.print_exc()
            return _complain("this is a bug in Postroad; please report it with the lines above", EXIT_BUG)
        context = getattr(error, "ctx", None)
        help_of = f" (see {context.command_path} --help)" if context is not None else ""
        return _complain(f"{str(describe()).rstrip('.')}{help_of}", EXIT_USAGE) if describe() else EXIT_USAGE


def _warn(message: Warning | str) -> None:
    """One line, as of an error: where in the program it arose is nothing to whoever typed a command."""
    print(f"postroad: warning: {message}", file=sys.stderr, flush=True)


def _open_closed_descriptors() -> None:
    """Started with `<&-`, the event loop would get descriptors 0 to 2 for its own, and it aborts on that."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        if number == 1:
            sys.stdout = open(number, "w", closefd=False)  # noqa: SIM115
        elif number == 2:  # else print() takes standard output instead
            sys.stderr = open(number, "w", closefd=False)  # noqa: SIM115
    os.close(number)


def _unread() -> int:
    """The reader of our output has seen enough; nothing more can be flushed there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_UNREAD


def _code(error: PostroadError) -> int:
    if isinstance(error, BugError):
        return EXIT_BUG
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def _complain(text: str, code: int) -> int:
    print(f"postroad: {text}", file=sys.stderr)
    return code
