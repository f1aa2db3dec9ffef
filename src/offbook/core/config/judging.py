"""What rollouts are worth and what is said about them: rewards, monitors, feedback."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from offbook.core.config.methods import CorrectionsConfig
from offbook.core.config.section import LOCAL, Section, TeacherName


class JudgeConfig(Section):
    """A model that reads rollouts, too; of `live` what users said after them."""

    url: str = Field(default="", description="of a server; `local` (feedback only) runs here; empty is none")
    name: str = Field(default="", description="its name there; for `local` as in `model`, empty: the trained model")
    rate: float = Field(default=0.0, ge=0, le=1, description="share of the rollouts that it reads")

    def idle(self, section: str, is_on: bool) -> str:
        """What would look as if it did something, in the section that it is of."""
        where = f"{section}.judge"
        if self.rate and not self.url:
            return f"{where}.url is empty, so there is no model for {where}.rate; give a URL"
        if is_on and self.url and not self.rate:
            return f"{where}.rate is 0: the model at {where}.url would read nothing; give a share"
        if is_on and self.url not in ("", LOCAL) and not self.name:
            return f"{where}.name is empty: a server is asked for a model by its name"
        return ""


class AgentConfig(Section):
    """A model behind a URL that looks into rollouts with tools that only read: docs/monitors.md."""

    url: str = Field(default="", description="of a server that speaks chat completions with tools; empty is none")
    name: str = Field(default="", description="of the model there")


class AuditorConfig(AgentConfig):
    """A model that audits rollouts."""

    rate: float = Field(default=0.0, ge=0, le=1, description="share of the rollouts that it reads")

    def idle(self, section: str, is_on: bool) -> str:
        return JudgeConfig(url=self.url, name=self.name, rate=self.rate).idle(section, is_on)


class FeedbackConfig(Section):
    """Targeted hints. `weight` 0 turns them off: RL alone."""

    method: Literal["targeted", "sdpo"] = Field(
        default="targeted",
        description="targeted: a hint per faulty message; sdpo: all hints before the first message teach the whole "
        "response",
    )
    weight: float = Field(default=1.0, ge=0, description="lambda, next to an RL loss of weight 1")
    balance: Literal["own", "rl", "bounded"] = Field(
        default="bounded",
        description="divides the hints' sum by: own, the candidates' tokens; rl, the step's RL tokens; bounded, the "
        "same, with the norm of its gradient at most `bound` times RL's",
    )
    bound: float = Field(default=0.3, gt=0, description="`balance` bounded only: times the norm of RL's gradient")
    rule_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="factor by rule; default 1, 0 turns a rule off"
    )
    rules: list[str] = Field(default=[], description="those of docs/feedback.md that are looked for; empty: all")
    files: list[str] = Field(default=[], description="Python files with your own rules; they run with your rights")
    max_targets: int = Field(default=3, ge=1, description="faulty messages of a rollout whose hint may teach")
    gate: float = Field(
        default=0.002,
        ge=0,
        description="nats per token of `direction` by which a hint must move its message away; 0 is no gate; divide "
        "by 4 for jsd",
    )
    token_gate: float = Field(
        default=0.02,
        ge=0,
        description="nats of `direction` by which a hint must move a token for it to teach; 0 is all; divide by 4 "
        "for jsd",
    )
    look: bool = Field(
        default=True,
        description="the hint probe before step 1: hints that do not help are not taught; if none helps the run stops",
    )
    control: Literal["", "none", "donor", "random_target", "every_turn", "constant_negative"] = Field(
        default="", description="what stands in for the hint, to compare with: docs/feedback.md; empty is nothing"
    )
    teacher: TeacherName = Field(default="frozen", description="whose weights the hinted model has: docs/feedback.md")
    direction: Literal["forward", "reverse", "jsd"] = Field(
        default="forward", description="forward is KL(teacher || student), reverse the other way round"
    )
    token_cap: float = Field(default=2.0, gt=0, description="the most nats that one token may count for")
    judge: JudgeConfig = JudgeConfig()
    corrections: CorrectionsConfig = CorrectionsConfig()

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        """Refuse settings that look as if they did something."""
        if problem := self.judge.idle("feedback", bool(self.weight)):
            raise ValueError(problem)
        return self

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
    """What solving costs: C(x) of docs/rewards.md, where x is the weighted share of what the limits allow."""

    on: bool = Field(default=False, description="whether solving costs anything")
    bound: float = Field(default=0.2, gt=0, lt=1, description="the most it can cost; solving is worth 1")
    k: float = Field(default=4.0, gt=0, description="of C(x): how early the cost levels off")
    full_tokens: int = Field(default=0, ge=0, description="what counts as all tokens; 0 is harness.tokens")
    full_turns: int = Field(default=0, ge=0, description="what counts as all turns; 0 is harness.turns")
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
    """What a rollout earns. Every part but the outcome is off until it has a weight."""

    partial: bool = Field(default=False, description="credit for some of the tests that need the feature")
    grade_s: float = Field(default=120.0, gt=0, description="how long the hidden tests of one rollout may take")
    perturbed: Literal["off", "finding", "outcome"] = Field(
        default="outcome",
        description="what other results than the gold's on changed inputs count as",
    )
    weights: dict[str, float] = Field(default={}, description="by name: a behaviour of docs/rewards.md or your own")
    files: list[str] = Field(default=[], description="Python files with your own; they run with your rights")
    effort: EffortConfig = EffortConfig()
    judge: AgentConfig = AgentConfig()


class MonitorsConfig(Section):
    """What looks for cheating in every rollout, and what a finding costs."""

    on: bool = Field(default=True, description="whether rollouts are searched for cheating")
    watch: bool = Field(default=True, description="let sandboxes tell which files are opened, where the machine can")
    policy: dict[str, Literal["count", "penalise", "zero", "quarantine"]] = Field(
        default={}, description="by the kind of finding, over the defaults of docs/monitors.md"
    )
    penalty: float = Field(default=0.5, ge=0, description="what `penalise` takes; solving is worth 1")
    judge: AuditorConfig = AuditorConfig()

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if problem := self.judge.idle("monitors", self.on):
            raise ValueError(problem)
        return self
