"""What rollouts are worth and what is said about them: rewards, monitors, feedback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import NonNegativeFloat, field_validator

from offbook.core.config.section import Section, TeacherName, key

JUDGED = ("clarity", "usefulness")  # rewards that a judge model gives, from -1 to 0


class JudgeConfig(Section):
    """A model that reads rollouts, for hints, monitors, live sessions, and the rewards `clarity` and `usefulness`."""

    url: str = key("", "a server with chat completions and tools")
    name: str = key("", "model name there")
    feedback: float = key(0.0, "share of rollouts read for hints", ge=0, le=1)
    monitors: float = key(0.0, "share of rollouts audited for cheating", ge=0, le=1)

    def problem(self, rewards: Iterable[str]) -> str:
        """What is missing for what is asked of the judge. `rewards` are the weighted ones."""
        uses = [f"judge.{use}" for use in ("feedback", "monitors") if getattr(self, use)]
        uses += [f"rewards.weights.{name}" for name in rewards if name in JUDGED]
        if uses and not (self.url and self.name):
            return f"judge.url or judge.name is empty, so there is no model for {uses[0]}; give both"
        return ""


class FeedbackConfig(Section):
    """Targeted hints: docs/feedback.md. `weight` 0: RL alone."""

    method: Literal["targeted", "sdpo"] = key(
        "targeted",
        "targeted: a hint before each faulty message teaches that message; sdpo: all hints before the first "
        "message teach the whole response",
    )
    weight: float = key(1.0, "of the hints' loss, where the RL loss has 1", ge=0)
    balance: Literal["own", "rl", "bounded"] = key(
        "bounded",
        "denominator of the hints' loss: own: the candidates' tokens; rl: the step's RL tokens; bounded: rl, with "
        "the gradient norm limited by `bound`",
    )
    bound: float = key(0.3, "bounded: maximum gradient norm, as a multiple of RL's", gt=0)
    rule_weights: dict[str, NonNegativeFloat] = key({}, "multiplies `weight` by rule; 0 turns a rule off")
    rules: list[str] = key([], "rules to look for (docs/feedback.md); empty: all")
    files: list[str] = key([], "Python files with your rules; they run with your rights")
    max_targets: int = key(3, "maximum faulty messages per context window that teach", ge=1)
    gate: float = key(0.002, "nats per token by which a hint must move its message (jsd: a quarter); 0: no gate", ge=0)
    token_gate: float = key(
        0.02,
        "nats by which a hint must move a token for it to teach (jsd: a quarter); 0: all tokens",
        ge=0,
    )
    look: bool = key(
        True,
        "before the first update sample faulty messages with and without each hint; rules whose hint does not help "
        "are not taught, and if none helps the run ends",
    )
    control: Literal["", "none", "donor", "random_target", "every_turn", "constant_negative"] = key(
        "",
        "replaces the hint, as a control experiment (docs/feedback.md)",
    )
    teacher: TeacherName = key("frozen", "weights of the hinted model (docs/feedback.md)")
    direction: Literal["forward", "reverse", "jsd"] = key(
        "forward",
        "forward: KL(teacher || student); reverse: KL(student || teacher)",
    )

    @property
    def is_look_due(self) -> bool:
        """Not under a control, which shows what another hint does, nor where hints stand elsewhere."""
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


class TeachersConfig(Section):
    """Teachers of whole responses: docs/methods.md."""

    weights: dict[Literal["opd", "opsd", "sdft"], NonNegativeFloat] = key(
        {},
        "of each method's loss, where the RL loss has 1",
    )
    model: str = key("", "opd: the teacher, named as in `model`, with the student's tokenizer")

    @property
    def opd(self) -> float:
        return self.weights.get("opd", 0.0)

    @property
    def opsd(self) -> float:
        return self.weights.get("opsd", 0.0)

    @property
    def sdft(self) -> float:
        return self.weights.get("sdft", 0.0)


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

    bound: float = key(0.0, "maximum cost of effort, as in 0.2; solving is worth 1; 0: off", ge=0, lt=1)
    weights: dict[str, NonNegativeFloat] = key({}, "by kind, over the defaults of docs/rewards.md")

    @field_validator("weights")
    @classmethod
    def _known(cls, weights: dict[str, float]) -> dict[str, float]:
        if unknown := sorted(weights.keys() - EFFORT_KINDS.keys()):
            raise ValueError(f"rewards.effort.weights has no {unknown[0]}; there are {', '.join(EFFORT_KINDS)}")
        return weights


class RewardsConfig(Section):
    """What a rollout earns: docs/rewards.md. Every part but the outcome needs a weight."""

    partial: bool = key(False, "partial credit for some of the feature's tests")
    grade_s: float = key(120.0, "timeout of a rollout's hidden tests", gt=0)
    perturbed: Literal["off", "finding", "outcome"] = key("outcome", "what another answer to a recorded call counts as")
    weights: dict[str, float] = key({}, "of behaviours (docs/rewards.md) and of your rewards, by name")
    files: list[str] = key([], "Python files with your rewards; they run with your rights")
    effort: EffortConfig = EffortConfig()


class MonitorsConfig(Section):
    """The search for cheating: docs/monitors.md."""

    on: bool = key(True, "search rollouts for cheating")
    policy: dict[str, Literal["count", "penalise", "zero", "quarantine"]] = key(
        {},
        "by kind of finding, over the defaults of docs/monitors.md",
    )
