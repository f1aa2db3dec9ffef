"""The command line: one file per verb. Heavy imports wait until a verb needs them, so `offbook --help` is instant."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

import offbook
from offbook.cli import (
    agent,
    audit,
    coach,
    compare,
    distill,
    doctor,
    evaluate,
    export,
    fit,
    live,
    mtp,
    plan,
    pretrain,
    quickstart,
    rollout,
    serve,
    sft,
    stages,
    tasks,
    train,
    view,
)
from offbook.cli.options import CONFIGURED, most_used
from offbook.types import Hung, OffbookError

HELP = "Post-train a coding agent until it no longer needs the hint."
INTERRUPTED = 130
# The verbs that resume when the same command is given again.
RESUMED = ("quickstart", "tasks", "rollout", "pretrain", "sft", "distill", "train", "stages", "eval", "live")
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)
# The base of all usage errors. For some versions of typer it is click's, for others that of their own copy of click.
UsageError: Any = typer.BadParameter.__base__
# Each verb with an example, and whether it takes configuration.
VERBS: dict[str, tuple[Callable[..., None], str, bool]] = {
    "quickstart": (quickstart.quickstart, "--out runs/quickstart", True),
    "rollout": (rollout.rollout, "pocket --limit 2", True),
    "serve": (serve.serve, "--model pocket --out runs/serve", True),
    "agent": (agent.agent, '. "Fix the failing test"', True),
    "live": (live.live, "--model pocket --out runs/live --once", True),
    "plan": (plan.plan, "Qwen/Qwen3-0.6B --gpu-memory 80", True),
    "pretrain": (pretrain.pretrain, "--model pocket --data pocket-code:200", True),
    "sft": (sft.sft, "--model pocket --data runs/train --out runs/sft", True),
    "mtp": (mtp.mtp, "pocket --out runs/mtp", True),
    "distill": (distill.distill, "logs.jsonl --model pocket", True),
    "fit": (fit.fit, "Qwen/Qwen3-0.6B --tasks.source my-tasks", True),
    "stages": (stages.stages, "@ full --out runs/full", True),
    "train": (train.train, "--model pocket --out runs/train --train.steps 10", True),
    "eval": (evaluate.evaluate, "runs/train", True),
    "compare": (compare.compare, "runs/eval-a runs/eval-b", False),
    "export": (export.export, "runs/train --to openai --out messages.jsonl", False),
    "coach": (coach.coach, "runs/train --out hints.jsonl", False),
    "view": (view.view, "runs/train", False),
    "audit": (audit.audit, "runs/train", False),
    "doctor": (doctor.doctor, "", False),
}


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
for name, (does, example, is_configured) in VERBS.items():
    keys = f"{most_used()}\n\n" if name == "train" else ""
    how: dict[str, Any] = {"cls": Configured, "context_settings": CONFIGURED} if is_configured else {}
    app.command(name, epilog=f"{keys}For example: offbook {name} {example}".strip(), **how)(does)
    if name == "quickstart":
        app.add_typer(tasks.app, name="tasks")


def _version(asked: bool) -> None:
    if asked:
        print(f"offbook {offbook.__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def _offbook(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None: ...


def main() -> NoReturn:
    """Process entry point: errors that the user can fix are one sentence, an interrupt says how to resume."""
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao where it is installed, which warns
        logging.getLogger(name).setLevel(logging.ERROR)
    # Threads that spin while they wait take the cores from the sandboxes and from other runs: half the speed, measured.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    sentence, code = "", 0
    try:
        done = app(arguments, prog_name="offbook", standalone_mode=False)
        code = done if isinstance(done, int) else 0
    except UsageError as error:
        code = error.exit_code
        if said := " ".join(error.format_message().split()).rstrip("."):  # none where help was shown instead
            command, path = (error.ctx.command, error.ctx.command_path) if error.ctx else (None, "offbook")
            example = (getattr(command, "epilog", "") or "").partition("For example: ")[2]
            sentence = f"{said} (see `{path} --help`{f'; for example: {example}' if example else ''})"
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (OffbookError, OSError) as error:
        # What a full disk looks like to a library that wants a temporary file while it is imported.
        no_place = isinstance(error, OSError) and "temporary directory" in str(error.strerror)
        if isinstance(error, OSError) and not no_place and error.errno not in UNWRITABLE:
            raise
        if debug:
            traceback.print_exc()
        sentence, code = str(error), getattr(error, "exit_code", 1)
        if isinstance(error, OSError):
            path = error.filename or "a file"
            sentence = f"cannot write {path}: {error.strerror}; free some space or choose another folder"
        if isinstance(error, Hung):  # Python would wait for the thread that hangs
            print(f"offbook: {sentence}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(code)
    if code == INTERRUPTED:  # also how typer passes Ctrl-C on
        is_resumed = bool(arguments) and arguments[0] in RESUMED
        sentence = f"stopped{'; everything so far is kept, and the same command resumes' if is_resumed else ''}"
    if sentence:
        print(f"offbook: {sentence}", file=sys.stderr)
    sys.exit(code)
