"""What can be set: one frozen tree. A value lives in one place.

Its defaults are for a model that reads and writes English; recipes/ has what other models need.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self, get_args

import tomli_w
from pydantic import Field, PrivateAttr, model_validator

from offbook.core.config.judging import FeedbackConfig, JudgeConfig, MonitorsConfig, RewardsConfig
from offbook.core.config.methods import TeachersConfig
from offbook.core.config.running import EvalConfig, LiveConfig, LoopConfig
from offbook.core.config.section import LOCAL, Precision, Section
from offbook.core.config.stages import PretrainConfig, SftConfig, StagesConfig
from offbook.core.config.training import CheckpointConfig, MtpConfig, TrainConfig
from offbook.core.config.world import EngineConfig, HarnessConfig, SandboxConfig, TasksConfig, ToolsConfig


class Config(Section):
    out: str = Field(default="runs/train", description="run folder")
    model: str = Field(
        default="", description="`pocket`, `pocket-moe`, `smollm2-135m`, a run or model folder, a hub id, or a URL"
    )
    seed: int = Field(default=0, description="seed of all random draws")
    threads: int = Field(default=1, ge=1, description="torch threads; sandboxes use the other cores")
    tasks: TasksConfig = TasksConfig()
    harness: HarnessConfig = HarnessConfig()
    tools: ToolsConfig = ToolsConfig()
    sandbox: SandboxConfig = SandboxConfig()
    engine: EngineConfig = EngineConfig()
    train: TrainConfig = TrainConfig()
    feedback: FeedbackConfig = FeedbackConfig()
    teachers: TeachersConfig = TeachersConfig()
    rewards: RewardsConfig = RewardsConfig()
    monitors: MonitorsConfig = MonitorsConfig()
    judge: JudgeConfig = JudgeConfig()
    pretrain: PretrainConfig = PretrainConfig()
    sft: SftConfig = SftConfig()
    stages: StagesConfig = StagesConfig()
    mtp: MtpConfig = MtpConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    loop: LoopConfig = LoopConfig()
    eval: EvalConfig = EvalConfig()
    live: LiveConfig = LiveConfig()
    _given: frozenset[str] = PrivateAttr(frozenset())  # dotted keys that a call of `api.configure` names

    @model_validator(mode="before")
    @classmethod
    def _one_precision(cls, tree: Any) -> Any:
        """An engine of which nothing else is said samples in the trainer's precision, and may share its base."""
        if not isinstance(tree, dict):
            return tree
        train, engine = tree.get("train", {}), tree.get("engine", {})
        precision = train.get("precision") if isinstance(train, dict) else getattr(train, "precision", None)
        if precision not in get_args(Precision) or not isinstance(engine, dict):
            return tree
        return {**tree, "engine": {"precision": precision, **engine}}

    @model_validator(mode="before")
    @classmethod
    def _no_look(cls, tree: Any) -> Any:
        """What a look samples is answered by offbook's own tools, which other agents do not have."""
        if not isinstance(tree, dict):
            return tree
        harness, feedback = tree.get("harness", {}), tree.get("feedback", {})
        if not isinstance(harness, dict) or not harness.get("command") or not isinstance(feedback, dict):
            return tree
        return {**tree, "feedback": {"look": False, **feedback}}

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if problem := self.judge.problem(name for name, weight in self.rewards.weights.items() if weight):
            raise ValueError(problem)
        if self.harness.command:
            if self.feedback.look:
                raise ValueError("feedback.look answers by offbook's own tools: with harness.command leave it false")
            if self.engine.kind == "lockstep":
                raise ValueError("your agents ask when they like: harness.command needs engine.kind continuous")
            if self.sandbox.backend == "container":
                raise ValueError("harness.command does not work in containers: leave sandbox.backend bwrap")
        if self.tools.add and self.harness.profile == "bash":
            raise ValueError("the profile bash has one tool, so tools.add is never used; take another harness.profile")
        if self.harness.dialect != "auto" and (self.harness.profile == "bash" or is_url(self.model)):
            what = "the model is behind a URL" if is_url(self.model) else "the profile bash has one of its own"
            raise ValueError(f"harness.dialect has no effect where {what}; leave it out")
        if self.loop.ray.samplers and (problem := self._unfit_elsewhere()):
            raise ValueError(f"loop.ray.samplers is {self.loop.ray.samplers}, and {problem}")
        if self.loop.refill and self.tasks.order != "select":
            raise ValueError("loop.refill draws other tasks in the middle of a batch; give --tasks.order select")
        if self.loop.refill and self.engine.kind == "lockstep":
            raise ValueError("loop.refill would have lockstep wait for it; give --engine.kind continuous")
        if self.loop.max_staleness and (problem := self._unfit_beside_training()):
            raise ValueError(f"loop.max_staleness is {self.loop.max_staleness}, and {problem}")
        return self

    def _unfit_elsewhere(self) -> str:
        """What cannot be where samplers have the engine."""
        if self.engine.kind != "vllm" and self.train.lora.rank:
            return "a local engine elsewhere takes no adapters; give --engine.kind vllm, or --train.lora.rank 0"
        if self.engine.kind == "vllm" and self.engine.vllm.given_urls:
            return "each starts a vLLM of its own; leave engine.vllm.url out"
        if self.engine.kind == "vllm" and self.engine.vllm.copies > 1:
            return "each starts a vLLM of its own; leave engine.vllm.copies out, and give more samplers"
        if self._is_judged_by_itself:
            return "the judge has no engine here to read with; give judge.name another model"
        return ""

    def _unfit_beside_training(self) -> str:
        """What cannot be while the trainer works and weights change in the middle of rollouts."""
        engine = self.engine
        if engine.kind == "lockstep" and self.loop.max_staleness > 1:
            return "lockstep samples one batch at a time; give 1, or --engine.kind continuous"
        if engine.kind == "vllm" and engine.vllm.sleep:
            return "vLLM is to sleep while the trainer works; give --engine.vllm.sleep false"
        if self._is_judged_by_itself:
            return "the judge would read with weights that change; give judge.name another model"
        return ""

    @property
    def _is_judged_by_itself(self) -> bool:
        """Whether the model that is being trained reads its own rollouts."""
        return bool(self.feedback.weight) and self.judge.url == LOCAL and not self.judge.name

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump())


def cache_folder() -> Path:
    """Where things made on the spot are kept: $OFFBOOK_CACHE, or offbook in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "offbook"
    return Path(os.environ.get("OFFBOOK_CACHE", default))


def is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))
