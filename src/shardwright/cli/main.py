"""The `shardwright` command: verbs, and how every one of them ends.

Exit codes: 0 done, 1 a check failed, 2 wrong input, 3 the run failed, 4 preempted and saved.
"""

from __future__ import annotations

import errno
import json
import signal
import sys
import traceback
from collections.abc import Sequence

import typer

from shardwright import __version__
from shardwright.cli.streams import escape_unencodable, printable
from shardwright.cli.verbs import VERBS
from shardwright.errors import ExitCode, InputError, ShardwrightError

_SHOWN_CHARACTERS = 200
_INTERRUPTED = 128 + signal.SIGINT
"""What the parser makes of a Ctrl-C that no verb took."""


def build_app(verb: str | None) -> typer.Typer:
    """The command line with the called verb's own options; of the other verbs only what --help says of them."""
    app = typer.Typer(
        name="shardwright",
        help="Plan, prove and train large language models over any number of devices.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True)(_version)
    for name, known in VERBS.items():
        if name != verb:
            app.command(name, help=known.summary)(_not_called)
            continue
        loaded = known.load()
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=name, help=known.summary)
        else:
            app.command(name)(loaded)
    return app


def _version(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        sys.stdout.write(f"shardwright {__version__}\n")
        raise typer.Exit


def _not_called() -> None:
    raise AssertionError("a verb that was not called ran")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with the verb's exit code."""
    code = run(arguments)
    # All is said and saved; one more Ctrl-C while the interpreter winds up must not change how it ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Errors of ours are one message, anything else a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    escape_unencodable()
    try:
        left = build_app(next((word for word in words if not word.startswith("-")), None))(words, standalone_mode=False)
        if left == _INTERRUPTED:
            raise KeyboardInterrupt
        return left if isinstance(left, int) else ExitCode.DONE
    except KeyboardInterrupt:
        message = "interrupted; nothing was saved"
        sys.stderr.write(f"{message}\n")
        return _end(ExitCode.RUN_FAILED, "Interrupted", message, as_json=as_json)
    except ShardwrightError as error:
        _tell(error, as_json=as_json)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            return _report_bug(error, as_json=as_json)
        path = str(error.filename)
        shown = path if len(path) <= _SHOWN_CHARACTERS else f"{path[:_SHOWN_CHARACTERS]}... ({len(path):,} characters)"
        refused = InputError(f"the path cannot be followed: {error.strerror}", got=shown)
        _tell(refused, as_json=as_json)
        return refused.exit_code
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "show"):  # the parser's: an option or a verb that is none
            error.show()
            return _end(ExitCode.WRONG_INPUT, "UsageError", error.format_message(), as_json=as_json)
        return _report_bug(error, as_json=as_json)


def _report_bug(error: Exception, *, as_json: bool) -> ExitCode:
    """The traceback of an error that is none of ours."""
    sys.stderr.write(f"{traceback.format_exc()}this is a bug in shardwright {__version__}, not in your input\n")
    return _end(ExitCode.RUN_FAILED, type(error).__name__, str(error), as_json=as_json)


def _end(code: ExitCode, kind: str, message: str, *, as_json: bool) -> ExitCode:
    """Under --json, how it ended as an object on standard output; the exit code comes back."""
    if as_json:
        told = {"kind": kind, "message": message, "exit_code": int(code)}
        sys.stdout.write(json.dumps({"schema_version": 1, "error": told}) + "\n")
    return code


def _tell(error: ShardwrightError, *, as_json: bool) -> None:
    """The error on standard error, and as an object on standard output under --json."""
    label = "stopped" if error.exit_code == ExitCode.PREEMPTED else "error"
    sys.stderr.write(f"{label}: {printable(str(error))}\n")
    if as_json:
        told: dict[str, object] = {"kind": type(error).__name__, "message": str(error), "exit_code": int(error.exit_code)}
        if isinstance(error, InputError):
            got = None if error.got is None else str(error.got)
            told |= {"field": error.field, "got": got, "allowed": error.allowed, "remedy": error.remedy}
        sys.stdout.write(json.dumps({"schema_version": 1, "error": told}) + "\n")
