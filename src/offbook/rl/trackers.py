"""Metrics for dashboards: trackio, wandb, tensorboard. metrics.jsonl stays the truth; a tracker only follows it."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import uuid
from contextlib import redirect_stdout
from typing import Any, Literal

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, write_atomic
from offbook.types import OffbookError

Kind = Literal["trackio", "wandb", "tensorboard"]
PACKAGES = {"trackio": "trackio", "wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}
log = logging.getLogger(__name__)


class Tracker:
    """Sends the rows of metrics.jsonl that the tracker does not have, each step once.

    RUN/trackers.json says how far each kind is. Any error of a tracker is one warning: the run goes on, and the same
    command sends the rest later.
    """

    def __init__(self, kind: Kind, config: Config):
        try:
            self._package = importlib.import_module(PACKAGES[kind])
        except ImportError:
            raise OffbookError(f"--log {kind} needs a package: pip install {kind}, or 'offbook[trackers]'") from None
        self._kind = kind
        self._config = config
        self._folder = RunFolder(config.out)
        self._run: Any = None
        self._failed = False

    def follow(self, is_last: bool = False) -> None:
        if self._failed:
            return
        try:
            with redirect_stdout(sys.stderr):  # some print a greeting, and our stdout may be JSON
                self._send_new()
                if is_last and self._run:
                    self._run.close() if self._kind == "tensorboard" else self._run.finish()
        except Exception as error:  # of any kind: the network, an account, a full disk
            self._failed = True
            reason = (str(error) or type(error).__name__).splitlines()[0]
            log.warning("%s failed (%s); metrics.jsonl has all steps", self._kind, reason)

    def close(self) -> None:
        self.follow(is_last=True)

    def _open(self, run_id: str) -> Any:
        folder = self._folder.path
        if self._kind == "tensorboard":
            return self._package.SummaryWriter(log_dir=str(folder / "tensorboard"))
        about = {"project": "offbook", "resume": "allow", "config": self._config.model_dump()}
        if self._kind == "wandb":
            return self._package.init(name=folder.name, id=run_id, dir=str(folder), **about)
        return self._package.init(name=f"{folder.name}-{run_id}", **about)

    def _send_new(self) -> None:
        path = self._folder.path / "trackers.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        mine = known.setdefault(self._kind, {"id": uuid.uuid4().hex[:8], "step": 0})
        for row in self._folder.metrics()[0]:
            step = row["step"]
            if step <= mine["step"]:
                continue
            self._run = self._run or self._open(mine["id"])
            numbers = {key: value for key, value in row.items() if key != "step" and isinstance(value, int | float)}
            if self._kind == "tensorboard":
                for name, number in numbers.items():
                    self._run.add_scalar(name, number, step)
                self._run.flush()
            else:
                self._run.log(numbers, step=step)
            mine["step"] = step
            write_atomic(path, json.dumps(known) + "\n")
