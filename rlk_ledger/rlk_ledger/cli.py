"""The command line: a click group whose commands are found by entry point and imported when invoked.

`--help` reads the commands' first docstring line from their source, so listing them imports none of them.
Exit codes: 0 fine, 1 a finding of severity error, 2 the command could not do its work (usage, missing ledger), 3 gaps.
"""

import ast
import errno
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from rlk_ledger_schemas.errors import RlkError

GROUP = "rlk_ledger.commands"
_BROKEN_PIPE = 141  # what a shell reports for a program ended by SIGPIPE
_NO_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)


class LazyGroup(click.Group):
    """Loads a command's module when the command is invoked, never before."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_entry_points())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _entry_points().get(cmd_name)
        if entry is None:
            return None
        try:
            command: click.Command = entry.load()
        except ModuleNotFoundError as error:
            extra = "replay" if entry.module.startswith("rlk_ledger_replay") else "dev"
            raise click.UsageError(
                f'`{cmd_name}` needs {error.name}, which is not installed: pip install "rlk-ledger[{extra}]"'
            ) from None
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in _entry_points():
            import difflib

            near = difflib.get_close_matches(name, _entry_points(), n=1)
            hint = f"did you mean `{near[0]}`?" if near else "`rlk-ledger --help` lists the commands."
            raise click.UsageError(f"there is no command `{name}`; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        room = formatter.width - 6 - max(map(len, names), default=0)
        with formatter.section("Commands"):
            formatter.write_dl([(name, _short(summary(name), room)) for name in names])


def _short(text: str, room: int) -> str:
    return text if len(text) <= max(room, 24) else text[: max(room, 24) - 3].rsplit(" ", 1)[0] + "..."


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}


def summary(name: str) -> str:
    """The first line of a command's docstring, read from its source; empty when it cannot be read."""
    entry = _entry_points()[name]
    try:
        spec = importlib.util.find_spec(entry.module)
        source = Path(spec.origin).read_text() if spec is not None and spec.origin else ""
    except (ImportError, OSError, ValueError):
        return ""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr.rstrip("_"):
            return (ast.get_docstring(node) or "").partition("\n")[0].rstrip(".")
    return ""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="rlk-ledger", prog_name="rlk-ledger")
def cli() -> None:
    """Record what both engines of an RL run did, verify the record, name the drift.

    Every command that reads a ledger takes --ledger URL (or RLK_LEDGER), every one --json and --debug (a
    traceback). Exit codes: 0 fine, 1 a finding of severity error, 2 the command could not do its work, 3 something is
    missing.
    """


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code. Every error is one sentence on stderr."""
    arguments = sys.argv[1:] if argv is None else argv
    _open_streams()
    try:
        # Not `cli.main`: it would turn a closed pipe into exit code 1, which here means a finding.
        with cli.make_context("rlk-ledger", list(arguments)) as context:
            code = cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        return _say(_plain(error.format_message()) + _usage(error, arguments), 2)
    except click.Abort:
        return _say("stopped.", 130)
    except BrokenPipeError:
        _discard_output()
        return _BROKEN_PIPE
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0 if error.code is None else _say(str(error.code), 2)
    except RlkError as error:
        _debug(arguments)
        return _say(str(error), 2)
    except KeyboardInterrupt:
        return _say("stopped.", 130)
    except Exception as error:
        _debug(arguments)
        if isinstance(error, OSError) and error.filename is None and error.errno in _NO_OUTPUT:
            _discard_output()
            return _say(f"the output cannot be written ({error.strerror}); send it elsewhere.", 2)
        return _say(f"internal error: {type(error).__name__}: {error}; --debug shows where, please report it.", 2)
    return code if isinstance(code, int) else 0


def _debug(arguments: Sequence[str]) -> None:
    """The traceback of the error at hand, where it is wanted. The exit code stays: Python's own 1 means a finding."""
    if "--debug" in arguments:
        traceback.print_exc()


def _plain(message: str) -> str:
    """A sentence of the parser's, in words and with its full stop."""
    message = message.replace("a valid float range", "a number").replace("a valid integer range", "a whole number")
    return message if message.rstrip().endswith((".", "?", "!")) or "\n" in message else f"{message}."


_MISTYPED = (click.MissingParameter, click.NoSuchOption, click.BadOptionUsage, click.BadArgumentUsage)


def _usage(error: click.ClickException, arguments: Sequence[str]) -> str:
    """Where the usage is, for what the parser itself refused; our own sentences say what to do."""
    if isinstance(error, _MISTYPED) or error.message.startswith("Got unexpected"):
        context = getattr(error, "ctx", None)  # the parser's own errors have none
        named = arguments[0] if arguments and arguments[0] in _entry_points() else None
        command = context.command_path if context is not None else " ".join(filter(None, ("rlk-ledger", named)))
        return f" `{command} --help` says how."
    return ""


def _open_streams() -> None:
    """A command whose caller closed stdout or stderr does its work and says nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - it stays open as long as the process


def _discard_output() -> None:
    """Lets the interpreter flush what is left of stdout into nothing on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str, code: int) -> int:
    click.echo(f"rlk-ledger: {message}", err=True)
    return code
