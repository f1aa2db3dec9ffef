"""The command line: one file per verb. Heavy imports wait until a verb needs them, so `offbook --help` is instant."""

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable
from inspect import signature
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

import offbook
from offbook.cli import agent, coach, compare, evaluate, plan, quickstart, tasks, train, view
from offbook.cli.options import option
from offbook.types import Hung, OffbookError

HELP = "Post-train a coding agent until it no longer needs the hint."
INTERRUPTED = 130
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)
# The base of all usage errors. For some versions of typer it is click's, for others that of their own copy of click.
UsageError: Any = typer.BadParameter.__base__
VERBS: tuple[Callable[..., None], ...] = (
    quickstart.quickstart,
    evaluate.rollout,
    agent.serve,
    agent.agent,
    agent.live,
    plan.plan,
    train.pretrain,
    train.sft,
    train.mtp,
    train.distill,
    plan.fit,
    train.stages,
    train.train,
    evaluate.evaluate,
    compare.compare,
    compare.export,
    coach.coach,
    view.view,
    coach.audit,
    plan.doctor,
)


class Configured(TyperCommand):
    """A verb that takes configuration. `@` and unknown options are configuration, never one of the verb's arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        left = super().parse_args(ctx, args)
        for param in self.params:
            value = str(ctx.params.get(param.name))
            if param.param_type_name == "argument" and value.startswith(("-", "@")):
                if param.required:
                    problem = f"{value} is an option of the configuration and comes after it"
                    raise typer.BadParameter(problem, ctx, param_hint=f"'{param.name}'")
                ctx.params[param.name] = param.get_default(ctx)
                ctx.args.insert(0, value)
        return left


app = typer.Typer(
    name="offbook",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Every verb takes --debug: a traceback instead of one sentence when something goes wrong. "
    "For example: offbook quickstart",
)
for verb in VERBS:
    is_configured = "ctx" in signature(verb).parameters
    any_options = {"allow_extra_args": True, "ignore_unknown_options": True}
    how: dict[str, Any] = {"cls": Configured, "context_settings": any_options} if is_configured else {}
    app.command("eval" if verb is evaluate.evaluate else None, **how)(verb)
app.add_typer(tasks.app, name="tasks")


def _version(asked: bool) -> None:
    if asked:
        print(f"offbook {offbook.__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def _offbook(
    version: Annotated[
        bool, option("Print the version and stop.", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None: ...


def main() -> NoReturn:
    """Process entry point: errors that the user can fix are one sentence."""
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao where it is installed, which warns
        logging.getLogger(name).setLevel(logging.ERROR)
    # Threads that spin while they wait take the cores from the sandboxes and from other runs: half the speed, measured.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    sentence = ""
    code = 0
    try:
        code = app(arguments, prog_name="offbook", standalone_mode=False) or 0
    except UsageError as error:
        code = error.exit_code
        if said := " ".join(error.format_message().split()).rstrip("."):  # none where help was shown instead
            sentence = f"{said} (see `{error.ctx.command_path if error.ctx else 'offbook'} --help`)"
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OffbookError as error:
        sentence = str(error)
        code = error.exit_code
        if debug:
            traceback.print_exc()
        if isinstance(error, Hung):  # Python would wait for the thread that hangs
            print(f"offbook: {sentence}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(code)
    except OSError as error:
        # The latter is a full disk to a library that wants a temporary file while it is imported.
        if error.errno not in UNWRITABLE and "temporary directory" not in str(error.strerror):
            raise
        sentence = (
            f"cannot write {error.filename or 'a file'}: {error.strerror}; free some space or choose another folder"
        )
        code = 1
    if code == INTERRUPTED:  # also how typer passes Ctrl-C on
        sentence = "stopped; everything so far is kept, and the same command resumes a run"
    if sentence:
        print(f"offbook: {sentence}", file=sys.stderr)
    sys.exit(code)
