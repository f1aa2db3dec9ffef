"""The command line: one file per verb. Heavy imports wait until a verb needs them, so `offbook --help` is instant."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
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

app = typer.Typer(
    name="offbook",
    help="Post-train a coding agent until it no longer needs the hint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Every verb takes --debug: a traceback instead of one sentence when something goes wrong. "
    "For example: offbook quickstart",
)
INTERRUPTED = 130
STOPPED = "stopped; everything so far is kept, and the same command goes on from there"
# The verbs for which that is true.
RESUMED = ("quickstart", "tasks", "rollout", "pretrain", "sft", "distill", "train", "stages", "eval", "live")
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)
# The base of all usage errors. For some versions of typer it is click's, for others that of their own copy of click.
UsageError: Any = typer.BadParameter.__base__


class Configured(TyperCommand):
    """A verb that takes configuration too. An unknown option is that, and never one of the verb's own arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        left = super().parse_args(ctx, args)
        for param in self.params:
            value = str(ctx.params.get(param.name))
            if param.param_type_name != "argument" or not value.startswith("-"):
                continue
            if not ctx.params.get(f"{param.name}_option"):  # which says the same
                problem = f"{value} is an option of the configuration and comes after it"
                raise typer.BadParameter(problem, ctx, param_hint=f"'{param.name}'")
            ctx.params[param.name] = param.get_default(ctx)
            ctx.args.insert(0, value)
        return left


def _verb(name: str, does: Any, example: str, keys: str = "", **how: Any) -> None:
    """Add a verb. Its help ends with `keys` and the example, which the sentence about a wrong option ends with, too."""
    app.command(name, epilog=f"{keys}\n\nFor example: offbook {name}{example}".strip(), **how)(does)


_verb("quickstart", quickstart.quickstart, " --out runs/quickstart", context_settings=CONFIGURED)
app.add_typer(tasks.app, name="tasks")
_verb("rollout", rollout.rollout, " pocket --limit 2", cls=Configured, context_settings=CONFIGURED)
_verb("serve", serve.serve, " --model pocket --out runs/serve", context_settings=CONFIGURED)
_verb("agent", agent.agent, ' . "Fix the failing test"', cls=Configured, context_settings=CONFIGURED)
_verb("live", live.live, " --model pocket --out runs/live --once", context_settings=CONFIGURED)
_verb("plan", plan.plan, " Qwen/Qwen3-0.6B --gpu-memory 80", cls=Configured, context_settings=CONFIGURED)
_verb("pretrain", pretrain.pretrain, " --model pocket --data pocket-code:200", context_settings=CONFIGURED)
_verb("sft", sft.sft, " --model pocket --data runs/train --out runs/sft", context_settings=CONFIGURED)
_verb("mtp", mtp.mtp, " pocket --out runs/mtp", cls=Configured, context_settings=CONFIGURED)
_verb("distill", distill.distill, " logs.jsonl --model pocket", cls=Configured, context_settings=CONFIGURED)
_verb("fit", fit.fit, " Qwen/Qwen3-0.6B --tasks.source my-tasks", cls=Configured, context_settings=CONFIGURED)
_verb("stages", stages.stages, " @ full --out runs/full", context_settings=CONFIGURED)
EXAMPLE = " --model pocket --out runs/train --train.steps 10"
_verb("train", train.train, EXAMPLE, most_used(), context_settings=CONFIGURED)
_verb("eval", evaluate.evaluate, " runs/train", cls=Configured, context_settings=CONFIGURED)
_verb("compare", compare.compare, " runs/eval-a runs/eval-b")
_verb("export", export.export, " runs/train --to openai --out messages.jsonl")
_verb("coach", coach.coach, " runs/train --out hints.jsonl")
_verb("view", view.view, " runs/train")
_verb("audit", audit.audit, " runs/train")
_verb("doctor", doctor.doctor, "")


def _version(asked: bool) -> None:
    if asked:
        print(f"offbook {offbook.__version__}")
        raise typer.Exit


@app.callback()
def _offbook(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Post-train a coding agent until it no longer needs the hint."""


def main() -> NoReturn:
    """Process entry point: errors that the user can fix are one sentence, an interrupt says how to resume."""
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao where it is installed, which warns
        logging.getLogger(name).setLevel(logging.ERROR)
    # Threads that spin while they wait take the cores from the sandboxes and from other runs: half the speed, measured.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        code = app(arguments, prog_name="offbook", standalone_mode=False)
        if code == INTERRUPTED:  # how typer passes Ctrl-C on
            _say_stopped(arguments)
        sys.exit(code if isinstance(code, int) else 0)
    except UsageError as error:
        if sentence := " ".join(error.format_message().split()).rstrip("."):  # none where help was shown instead
            command, path = (error.ctx.command, error.ctx.command_path) if error.ctx else (None, "offbook")
            example = (getattr(command, "epilog", "") or "").partition("For example: ")[2]
            shown = f"; for example: {example}" if example else ""
            _say(f"{sentence} (see `{path} --help`{shown})")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _say_stopped(arguments)
        sys.exit(INTERRUPTED)
    except Hung as error:  # Python would wait for the thread that hangs
        if debug:
            traceback.print_exc()
        _say(str(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)
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


def _say_stopped(arguments: list[str]) -> None:
    _say(STOPPED if arguments[:1] and arguments[0] in RESUMED else "stopped")


def _say(sentence: str) -> None:
    print(f"offbook: {sentence}", file=sys.stderr)
