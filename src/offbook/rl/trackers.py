"""Metrics for dashboards: trackio, wandb, tensorboard. metrics.jsonl stays the truth, a tracker only follows it."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import uuid
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, write_atomic
from offbook.types import OffbookError

Kind = Literal["trackio", "wandb", "tensorboard"]
PROJECT = "offbook"
log = logging.getLogger(__name__)


class Sink(Protocol):
    def send(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Tensorboard:
    """Event files in the run folder: `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, package: Any, run: Path, run_id: str, config: dict[str, Any]):
        self._writer = package.SummaryWriter(log_dir=str(run / "tensorboard"))

    def send(self, step: int, numbers: dict[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()  # a kill must not lose what counts as sent

    def close(self) -> None:
        self._writer.close()


class Logged:
    """A run of wandb, or of trackio, which has the same words."""

    def __init__(self, run: Any):
        self._run = run

    @classmethod
    def by_wandb(cls, package: Any, run: Path, run_id: str, config: dict[str, Any]) -> Self:
        about = {"name": run.name, "id": run_id, "dir": str(run)}
        return cls(package.init(project=PROJECT, resume="allow", config=config, **about))

    @classmethod
    def by_trackio(cls, package: Any, run: Path, run_id: str, config: dict[str, Any]) -> Self:
        return cls(package.init(project=PROJECT, name=f"{run.name}-{run_id}", resume="allow", config=config))

    def send(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, tuple[str, Callable[..., Sink]]] = {
    "tensorboard": ("torch.utils.tensorboard", Tensorboard),
    "wandb": ("wandb", Logged.by_wandb),
    "trackio": ("trackio", Logged.by_trackio),
}


class Tracker:
    """Sends what metrics.jsonl has and the tracker has not, each step once, also when steps are done again.

    RUN/trackers.json says how far each kind is. Whatever goes wrong in a tracker is one warning: the run goes on, and
    the same command sends the rest later.
    """

    def __init__(self, kind: Kind, config: Config):
        module, self._make = SINKS[kind]
        try:
            self._package = importlib.import_module(module)
        except ImportError:
            raise OffbookError(f"--log {kind} needs a package: pip install {kind}, or 'offbook[trackers]'") from None
        self._kind, self._config, self._folder = kind, config, RunFolder(config.out)
        self._sink: Sink | None = None
        self._failed = False

    def follow(self) -> None:
        self._guard(self._send_new)

    def close(self) -> None:
        self.follow()
        if self._sink:
            self._guard(self._sink.close)

    def _guard(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            with redirect_stdout(sys.stderr):  # some greet there, and ours may be JSON
                work()
        except Exception as error:  # theirs, of any kind: the network, an account, a full disk
            self._failed = True
            reason = (str(error) or type(error).__name__).splitlines()[0]
            log.warning(
                "%s failed (%s); the run goes on without it, and metrics.jsonl has all steps", self._kind, reason
            )

    def _send_new(self) -> None:
        path = self._folder.path / "trackers.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        mine = known.setdefault(self._kind, {"id": uuid.uuid4().hex[:8], "step": 0})
        for row in self._folder.metrics()[0]:
            step, sent = row["step"], mine["step"]
            if step <= sent:
                continue
            if self._sink is None:
                settings = self._config.model_dump()
                self._sink = self._make(self._package, self._folder.path, mine["id"], settings)
            mine["step"] = step
            write_atomic(path, json.dumps(known) + "\n")  # before: a step that a kill loses is better than one twice
            try:
                self._sink.send(step, {key: value for key, value in row.items() if _is_number(key, value)})
            except Exception:
                mine["step"] = sent
                write_atomic(path, json.dumps(known) + "\n")
                raise


def _is_number(key: str, value: object) -> bool:
    return key != "step" and isinstance(value, (int, float))
