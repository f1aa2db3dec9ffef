"""What can be set: one frozen tree. A value lives in one place.

Its defaults are for a model that reads and writes English; recipes/ has what other models need.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self, get_args

import tomli_w
from pydantic import model_validator

from offbook.core.config.judging import FeedbackConfig, JudgeConfig, MonitorsConfig, RewardsConfig, TeachersConfig
from offbook.core.config.running import EvalConfig, LiveConfig, LoopConfig
from offbook.core.config.section import Precision, Section, key
from offbook.core.config.stages import PretrainConfig, SftConfig, StagesConfig
from offbook.core.config.training import CheckpointConfig, MtpConfig, TrainConfig
from offbook.core.config.world import EngineConfig, HarnessConfig, SandboxConfig, TasksConfig, ToolsConfig


class Config(Section):
    out: str = key("runs/train", "run folder")
    model: str = key("", "`pocket`, `pocket-moe`, `smollm2-135m`, a run or model folder, a hub id, or a URL")
    seed: int = key(0, "seed of all random draws")
    threads: int = key(1, "torch threads; sandboxes use the other cores", ge=1)
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

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, tree: Any) -> Any:
        """By default an engine samples in the trainer's precision, and may share its base; and nothing is probed with
        another agent, which lacks the tools that answer what a probe samples."""
        if not isinstance(tree, dict):
            return tree
        sections = {name: tree.get(name, {}) for name in ("train", "engine", "harness", "feedback")}
        if not all(isinstance(section, dict) for section in sections.values()):
            return tree
        if sections["train"].get("precision") in get_args(Precision):
            sections["engine"] = {"precision": sections["train"]["precision"], **sections["engine"]}
        if sections["harness"].get("command"):
            sections["feedback"] = {"look": False, **sections["feedback"]}
        return tree | sections

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        engine = self.engine
        loop = self.loop
        is_lockstep = engine.kind == "lockstep"
        is_select = self.tasks.order == "select"
        own_vllm = engine.kind == "vllm" and not engine.vllm.given_urls and engine.vllm.copies == 1
        command = self.harness.command
        refused = (
            (self.teachers.opd and not self.teachers.model, "teachers.model is empty, so opd has no teacher"),
            (command and self.feedback.look, "feedback.look needs offbook's own tools; leave it out"),
            (command and is_lockstep, "harness.command needs --engine.kind continuous: your agents ask when they like"),
            (command and self.sandbox.backend == "container", "harness.command does not work in containers"),
            (self.tools.add and self.harness.profile == "bash", "the profile bash has one tool; leave tools.add out"),
            (self.tasks.harden and not is_select, "tasks.harden needs --tasks.order select"),
            (loop.refill and not is_select, "loop.refill needs --tasks.order select"),
            (loop.refill and is_lockstep, "loop.refill needs --engine.kind continuous"),
            (loop.max_staleness > 1 and is_lockstep, "loop.max_staleness above 1 needs --engine.kind continuous"),
            (loop.max_staleness and engine.vllm.sleep, "loop.max_staleness needs --engine.vllm.sleep false"),
            (loop.ray.samplers and self.train.lora.rank and engine.kind != "vllm", "a Ray sampler takes no adapters"),
            (loop.ray.samplers and engine.kind == "vllm" and not own_vllm, "each Ray sampler starts one vLLM itself"),
            (
                engine.vllm.copies > 1 and engine.vllm.given_urls,
                "engine.vllm.copies are started by offbook: no url",
            ),
            (engine.draft and engine.kind != "vllm", "engine.draft needs engine.kind vllm"),
        )
        problems = [self.judge.problem(name for name, weight in self.rewards.weights.items() if weight)]
        problems += [sentence for holds, sentence in refused if holds]
        if found := next(filter(None, problems), ""):
            raise ValueError(found)
        return self

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump())


def cache_folder() -> Path:
    """Where things made on the spot are kept: $OFFBOOK_CACHE, or offbook in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "offbook"
    return Path(os.environ.get("OFFBOOK_CACHE", default))


def is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))
