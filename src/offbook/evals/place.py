"""Where an evaluation is kept.

OUT/config.toml                the resolved configuration
OUT/claim.json                 what is measured on what: the same command goes on only with the same claim
OUT/rollouts/step_00000.jsonl  every rollout, scored
OUT/results.json               the numbers, and a row a rollout

So an evaluation is a run folder that `view`, `audit` and `export` read too. That of a training run is kept in the run's
eval/ folder, as NAME.json and NAME.rollouts.jsonl.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Place:
    """The files of an evaluation."""

    results: Path
    rollouts: Path
    claim: Path
    config: Path | None = None  # of a folder of its own
    replaceable: bool = False  # a run's evaluation follows its newest checkpoint

    @property
    def is_empty(self) -> bool:
        """Nothing would be lost."""
        return not self.results.is_file() and not (self.rollouts.is_file() and self.rollouts.stat().st_size)

    @classmethod
    def folder(cls, out: Path) -> Place:
        rollouts = out / "rollouts" / "step_00000.jsonl"
        return cls(out / "results.json", rollouts, out / "claim.json", out / "config.toml")

    @classmethod
    def in_run(cls, run: Path, name: str) -> Place:
        results, rollouts, claim = (run / "eval" / f"{name}.{end}" for end in ("json", "rollouts.jsonl", "claim.json"))
        return cls(results, rollouts, claim, replaceable=True)
