"""The `shardwright` command: verbs, exit codes and error output.

Exit codes: 0 done, 1 check failed, 2 wrong input, 3 run failed, 4 preempted after saving, 130
interrupted without saving, 141 output closed by its reader.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import typer

from shardwright.cli.output.json_output import print_json
from shardwright.cli.output.text_streams import escape_unencodable
from shardwright.cli.verbs import VERBS, load_command
from shardwright.control_characters import escape_control_characters
from shardwright.errors import ExitCode, InputError, RunFailed, ShardwrightError
from shardwright.masking import mask_secrets
from shardwright.version import __version__

_MAX_SHOWN_CHARACTERS = 200


def build_app(verb: str | None) -> typer.Typer:
    """Build the command line with the options of the called verb, and only summaries of the
    others."""
    app = typer.Typer(
        name="shardwright",
        help="Plan, verify and train large language models on any number of devices.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True)(_print_version)
    for name, summary in VERBS.items():
        if name != verb:
            app.command(name, help=summary)(_raise_not_called)
            continue
        loaded = load_command(name)
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=name, help=summary)
        else:
            app.command(name)(loaded)
    return app


def _print_version(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        sys.stdout.write(f"shardwright {__version__}\n")
        raise typer.Exit


def _raise_not_called() -> None:
    raise AssertionError("called a verb that was not requested")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with the verb's exit code."""
    code = run(arguments)
    # Everything is printed and saved: a Ctrl-C during interpreter shutdown must not change the
    # code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Our own errors are printed as one message, all others with a traceback.
    """
    argument_list = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in argument_list
    escape_unencodable()
    try:
        words = _words_to_complete() or argument_list
        verb = next((word for word in words if not word.startswith("-")), None)
        result = build_app(verb)(argument_list, standalone_mode=False)
        if result == ExitCode.INTERRUPTED:  # typer returns it for a Ctrl-C that no verb handled
            raise KeyboardInterrupt
        return result if isinstance(result, int) else ExitCode.DONE
    except KeyboardInterrupt:
        message = "interrupted; nothing new was saved"
        sys.stderr.write(f"{message}\n")
        return _report_end(ExitCode.INTERRUPTED, "Interrupted", message, as_json=as_json)
    except SystemExit as end:
        # typer ends with 1 if the reader of a pipe has closed it: for us that is a failed check.
        if isinstance(end.__context__, BrokenPipeError):
            return ExitCode.PIPE_CLOSED
        raise
    except ShardwrightError as error:
        _report_error(error, as_json=as_json)
        return error.exit_code
    except OSError as error:
        return _report_os_error(error, as_json=as_json)
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(
            error, "show"
        ):  # a usage error of the parser
            error.show()
            return _report_end(
                ExitCode.WRONG_INPUT, "UsageError", error.format_message(), as_json=as_json
            )
        return _report_bug(error, as_json=as_json)


def _words_to_complete() -> list[str]:
    """Words of the command line that a shell asks to complete, none in an ordinary call.

    Typer's scripts for shells (`--show-completion`) pass them in the environment: bash in
    COMP_WORDS, the others in _TYPER_COMPLETE_ARGS.
    """
    if "_SHARDWRIGHT_COMPLETE" not in os.environ:
        return []
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return line.split()[1:]


def _report_os_error(error: OSError, *, as_json: bool) -> ExitCode:
    """Print an error of a path, its permissions or a full disk as one message, any other with its
    traceback."""
    reported: ShardwrightError
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        path = str(error.filename)
        shown = (
            path
            if len(path) <= _MAX_SHOWN_CHARACTERS
            else f"{path[:_MAX_SHOWN_CHARACTERS]}... ({len(path):,} characters)"
        )
        reported = InputError(f"the path cannot be resolved: {error.strerror}", got=shown)
    elif error.errno == errno.EACCES and error.filename:
        reported = InputError(
            f"cannot be opened: {error.strerror}",
            field="path",
            got=str(error.filename),
            remedy="Ask its owner for access, or name another path",
        )
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = error.filename or "a file or the standard output"  # a write does not name its file
        reported = RunFailed(
            f"{place} cannot be written: {error.strerror}. Free space and run the command again"
        )
    else:
        return _report_bug(error, as_json=as_json)
    _report_error(reported, as_json=as_json)
    return reported.exit_code


def _report_bug(error: Exception, *, as_json: bool) -> ExitCode:
    """Print the traceback of an unexpected error."""
    sys.stderr.write(
        f"{mask_secrets(traceback.format_exc())}this is a bug in shardwright {__version__}, "
        "not an error in your input\n"
    )
    message = mask_secrets(str(error))
    return _report_end(ExitCode.RUN_FAILED, type(error).__name__, message, as_json=as_json)


def _report_end(code: ExitCode, kind: str, message: str, *, as_json: bool) -> ExitCode:
    """Under --json, print the error as an object on standard output; return the exit code."""
    if as_json:
        _print_json_error({"kind": kind, "message": message, "exit_code": int(code)})
    return code


def _print_json_error(content: dict[str, object]) -> None:
    with suppress(OSError):  # it may be standard output that cannot be written
        print_json({"error": content})


def _report_error(error: ShardwrightError, *, as_json: bool) -> None:
    """Print the error on standard error and, under --json, as an object on standard output."""
    label = "stopped" if error.exit_code == ExitCode.PREEMPTED else "error"
    sys.stderr.write(f"{label}: {escape_control_characters(str(error))}\n")
    if as_json:
        content: dict[str, object] = {
            "kind": type(error).__name__,
            "message": str(error),
            "exit_code": int(error.exit_code),
        }
        if isinstance(error, InputError):
            got = None if error.got is None else str(error.got)
            content |= {
                "field": error.field,
                "got": got,
                "allowed": error.allowed,
                "remedy": error.remedy,
            }
        _print_json_error(content)
