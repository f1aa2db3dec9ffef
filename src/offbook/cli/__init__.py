"""The command line: one file a verb. Heavy imports wait until a verb needs them, so `offbook --help` is instant."""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn

import click
import typer

from offbook.cli import audit, coach, compare, doctor, evaluate, export, quickstart, rollout, tasks, train, view
from offbook.types import OffbookError

app = typer.Typer(
    name="offbook",
    help="Post-train a coding agent until it no longer needs the hint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Every verb takes --debug: a traceback instead of one sentence when something goes wrong.",
)
INTERRUPTED = 130
STOPPED = "stopped; everything so far is kept, and the same command goes on from there"
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)
CONFIGURED = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command("quickstart", context_settings=CONFIGURED)(quickstart.quickstart)
app.add_typer(tasks.app, name="tasks")
app.command("rollout", context_settings=CONFIGURED)(rollout.rollout)
app.command("train", context_settings=CONFIGURED)(train.train)
app.command("eval", context_settings=CONFIGURED)(evaluate.evaluate)
app.command("compare")(compare.compare)
app.command("export")(export.export)
app.command("coach")(coach.coach)
app.command("view")(view.view)
app.command("audit")(audit.audit)
app.command("doctor")(doctor.doctor)


def main() -> NoReturn:
    """The border of the process: what a user can mend is one sentence, an interrupt says how to go on."""
    # Threads that spin while they wait take the cores from the sandboxes and from other runs: half the speed, measured.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        code = app(arguments, standalone_mode=False)
        if code == INTERRUPTED:  # how typer passes Ctrl-C on
            _say(STOPPED)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _say(STOPPED)
        sys.exit(INTERRUPTED)
    except OffbookError as error:
        if debug:
            raise
        _say(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        # What a full disk looks like to a library that wants a temporary file while it is imported.
        nowhere = error.errno == errno.ENOENT and "temporary directory" in str(error.strerror)
        if debug or not (nowhere or error.errno in UNWRITABLE):
            raise
        _say(f"cannot write {error.filename or 'a file'}: {error.strerror}; free some space or choose another folder")
        sys.exit(1)


def _say(sentence: str) -> None:
    print(f"offbook: {sentence}", file=sys.stderr)
