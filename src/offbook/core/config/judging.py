"""What rollouts are worth and what is said about them: rewards, monitors, feedback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, field_validator

from offbook.core.config.methods import CorrectionsConfig
from offbook.core.config.section import LOCAL, Section, TeacherName

JUDGED = ("clarity", "usefulness")  # rewards that a judge model gives, from -1 to 0


class JudgeConfig(Section):
    """A model that reads rollouts, for hints, monitors, live sessions, and the rewards `clarity` and `usefulness`."""

    url: str = Field(
        default="", description="a server with chat completions and tools; `local`, for hints only: runs here"
    )
    name: str = Field(
        default="", description="model name there; with `local` as in `model`, empty: the model in training"
    )
    feedback: float = Field(default=0.0, ge=0, le=1, description="share of rollouts read for hints")
    monitors: float = Field(default=0.0, ge=0, le=1, description="share of rollouts audited for cheating")

    def problem(self, rewards: Iterable[str]) -> str:
        """What is missing for the judge to do what is asked of it. `rewards` are the weighted ones."""
        others = ["judge.monitors"] if self.monitors else []
        others += [f"rewards.weights.{name}" for name in rewards if name in JUDGED]
        uses = [*(["judge.feedback"] if self.feedback else []), *others]
        if uses and not self.url:
            return f"judge.url is empty, so there is no model for {uses[0]}; give a URL"
        if self.url and not uses:
            return (
                "the model at judge.url would read nothing: give judge.feedback or judge.monitors a share, or a weight "
                f"to {' or '.join(JUDGED)}"
            )
        if self.url == LOCAL and others:
            return f"{others[0]} needs a server; give its URL as judge.url"
        if self.url not in ("", LOCAL) and not self.name:
            return "judge.name is empty: a server is asked for a model by its name"
        return ""


class FeedbackConfig(Section):
    """Targeted hints: docs/feedback.md. `weight` 0: RL alone."""

    method: Literal["targeted", "sdpo"] = Field(
        default="targeted",
        description="targeted: a hint before each faulty message teaches that message; sdpo: all hints before the "
        "first message teach the whole response",
    )
    weight: float = Field(default=1.0, ge=0, description="of the hints' loss, where the RL loss has 1")
    balance: Literal["own", "rl", "bounded"] = Field(
        default="bounded",
        description="denominator of the hints' loss: own: the candidates' tokens; rl: the step's RL tokens; "
        "bounded: rl, with the gradient norm limited by `bound`",
    )
    bound: float = Field(default=0.3, gt=0, description="bounded: maximum gradient norm, as a multiple of RL's")
    rule_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="multiplies `weight` by rule; 0 turns a rule off"
    )
    rules: list[str] = Field(default=[], description="rules to look for (docs/feedback.md); empty: all")
    files: list[str] = Field(default=[], description="Python files with your rules; they run with your rights")
    max_targets: int = Field(default=3, ge=1, description="maximum faulty messages per rollout that teach")
    gate: float = Field(
        default=0.002,
        ge=0,
        description="nats per token by which a hint must move its message (jsd: a quarter); 0: no gate",
    )
    token_gate: float = Field(
        default=0.02,
        ge=0,
        description="nats by which a hint must move a token for it to teach (jsd: a quarter); 0: all tokens",
    )
    look: bool = Field(
        default=True,
        description="before step 1 sample faulty messages with and without each hint; rules whose hint does not "
        "help are not taught, and if none helps the run ends",
    )
    control: Literal["", "none", "donor", "random_target", "every_turn", "constant_negative"] = Field(
        default="", description="replaces the hint, as a control experiment (docs/feedback.md)"
    )
    teacher: TeacherName = Field(default="frozen", description="weights of the hinted model (docs/feedback.md)")
    direction: Literal["forward", "reverse", "jsd"] = Field(
        default="forward", description="forward: KL(teacher || student); reverse: KL(student || teacher)"
    )
    corrections: CorrectionsConfig = CorrectionsConfig()

    @property
    def is_look_due(self) -> bool:
        """Before step 1. Not under a control, which shows what another hint does, nor where hints stand elsewhere."""
        return bool(self.look and self.weight and not self.control and self.method == "targeted")

    @property
    def max_candidates(self) -> int:
        """Faulty messages of a rollout that are given a hint: twice as many as teach, since the gate refuses some."""
        return 2 * self.max_targets if self.threshold else self.max_targets

    @property
    def threshold(self) -> float:
        """The gate, which controls go without: it would take away what they are there to show."""
        return 0.0 if self.control else self.gate

    @property
    def token_threshold(self) -> float:
        """Likewise; and SDPO teaches the whole response."""
        return 0.0 if self.control or self.method == "sdpo" else self.token_gate


EFFORT_KINDS = {  # what a share of all tokens, or of all turns, counts for; the agent does not write output itself
    "thinking_tokens": 1.0,
    "call_tokens": 1.0,
    "output_tokens": 0.25,
    "final_tokens": 1.0,
    "summary_tokens": 1.0,
    "calls": 0.25,
    "turns": 0.25,
}


class EffortConfig(Section):
    """The cost of tokens, calls and turns: docs/rewards.md."""

    bound: float = Field(
        default=0.0, ge=0, lt=1, description="maximum cost of effort, as in 0.2; solving is worth 1; 0: off"
    )
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={},
        description="by kind, over the defaults of docs/rewards.md",
    )

    @field_validator("weights")
    @classmethod
    def _known(cls, weights: dict[str, float]) -> dict[str, float]:
        if unknown := sorted(weights.keys() - EFFORT_KINDS.keys()):
            raise ValueError(f"rewards.effort.weights has no {unknown[0]}; there are {', '.join(EFFORT_KINDS)}")
        return weights


class RewardsConfig(Section):
    """What a rollout earns: docs/rewards.md. Every part but the outcome needs a weight."""

    partial: bool = Field(default=False, description="partial credit for some of the feature's tests")
    grade_s: float = Field(default=120.0, gt=0, description="timeout of a rollout's hidden tests")
    perturbed: Literal["off", "finding", "outcome"] = Field(
        default="outcome",
        description="what another answer to a recorded call counts as",
    )
    weights: dict[str, float] = Field(
        default={}, description="of behaviours (docs/rewards.md) and of your rewards, by name"
    )
    files: list[str] = Field(default=[], description="Python files with your rewards; they run with your rights")
    effort: EffortConfig = EffortConfig()


class MonitorsConfig(Section):
    """The search for cheating: docs/monitors.md."""

    on: bool = Field(default=True, description="search rollouts for cheating")
    policy: dict[str, Literal["count", "penalise", "zero", "quarantine"]] = Field(
        default={}, description="by kind of finding, over the defaults of docs/monitors.md"
    )
