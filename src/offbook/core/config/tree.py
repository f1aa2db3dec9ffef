"""What can be set: one frozen tree. A value lives in one place.

Its defaults are for a model that reads and writes English; recipes/ has what other models need.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from offbook.types import Limits

Precision = Literal["float32", "bfloat16"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def key(default: Any, description: str, **limits: Any) -> Any:
    """A key of the configuration; `limits` are pydantic's."""
    return Field(default=default, description=description, **limits)


class TasksConfig(Section):
    """Where tasks come from. Of Harbor's and verifiers' tasks a fifth is held out."""

    source: str = key(
        "pocket",
        "`pocket`, `pocket-long`, `pocket-long-3-8` (3 to 8 functions per task), a folder with `train/` and "
        "`heldout/`, a folder of Harbor tasks, or `verifiers:ID`",
    )
    num_train: int = key(120, "pocket: training tasks", ge=1)
    num_heldout: int = key(48, "pocket: held-out tasks", ge=1)
    heldout_share: float = key(
        0.0,
        "share of a folder's tasks to hold out where it has no `heldout/`; they share code with the rest",
        ge=0,
        lt=1,
    )
    order: Literal["shuffle", "select"] = key(
        "shuffle",
        "shuffle: epochs in random order; select: each task once, easy ones first, then by solve rate",
    )
    harden: float = key(
        0.0,
        "select: recent solve rate from which harder variants of a task are made, as in 0.8; 0: never",
        ge=0,
        le=1,
    )


class HarnessConfig(Section):
    """Who works, within which limits, and with which tools."""

    command: str = key(
        "",
        "your agent: a shell command in the sandbox, with the request in $OFFBOOK_INSTRUCTION (docs/serve.md); "
        "empty: offbook's agent",
    )
    mounts: dict[str, str] = key({}, "read-only folders for your agent: sandbox path to folder")
    turns: int = key(30, "maximum messages of the agent", ge=1)
    tokens: int = key(131_072, "maximum tokens of all segments", ge=1)
    context: int = key(32_768, "maximum tokens of one segment", ge=1)
    message_tokens: int = key(2048, "maximum tokens of one message", ge=1)
    summarize_at: int = key(24_576, "tokens of a segment before a self-summary; 0: never", ge=0)
    summary_tokens: int = key(2048, "maximum tokens of a self-summary", ge=1)
    command_s: float = key(60.0, "timeout of one command", gt=0)
    wall_s: float = key(3600.0, "timeout of a rollout", gt=0)
    prices: dict[Literal["input", "output"], NonNegativeFloat] = key(
        {},
        "per million prompt tokens (`input`) and sampled tokens (`output`)",
    )
    profile: Literal["pocket", "standard", "worked", "bash"] = key(
        "standard",
        "how tools are shown: described, by worked examples, as one shell, or in pocket's own way",
    )
    dialect: Literal["auto", "hermes", "xml", "json"] = key(
        "auto",
        "how the model writes calls (docs/models.md); auto: as it was trained here, or as its chat template has them",
    )
    variation: float = key(0.0, "how much tools differ between tasks", ge=0, le=1)

    def limits(self) -> Limits:
        return Limits(**self.model_dump(include={field.name for field in dataclasses.fields(Limits)}))


class ToolsConfig(Section):
    """Tools beyond those of the task: docs/tools.md."""

    files: list[str] = key([], "Python files with your tools; they run with your rights")
    add: list[str] = key([], "tools added to those of every task: of `files`, built in, or `find_code`")
    embeddings: str = key("", "find_code: folder or URL of an embedding model; empty: that of the `search` extra")
    embeddings_model: str = key("", "find_code: the model's name behind the URL")


class SandboxConfig(Section):
    """The sandbox of a rollout and its limits."""

    backend: Literal["bwrap", "container", "process"] = key("bwrap", "`process` is no sandbox: for code you trust")
    memory_mb: int = key(2048, "memory of all processes in a sandbox", ge=64)
    cpus: float = key(0.0, "processor cores; 0: no limit", ge=0)
    disk_mb: int = key(512, "disk space", ge=1)
    image: str = key("", "container: the image")


class VllmConfig(Section):
    """For `engine.kind` vllm: docs/engines.md."""

    url: str = key("", "a running server, or several, separated by commas; empty: start one")
    copies: int = key(1, "servers to start, each on `gpus` GPUs of its own", ge=1)
    python: str = key("", "interpreter or folder of vLLM's environment; empty: what `offbook doctor` finds")
    gpus: int = key(1, "GPUs that the model is spread over", ge=1)
    gpu_share: Literal["auto"] | PositiveFloat = key(
        "auto",
        "share of each GPU's memory; auto: what `offbook plan` finds, 0.4 without training",
    )
    sleep: bool = key(False, "free that memory while the trainer works")
    start_s: float = key(600.0, "timeout of a server's start", gt=0)
    options: list[str] = key([], "more of vLLM's command-line options")

    @property
    def given_urls(self) -> list[str]:
        """URLs of the servers that run already."""
        return [url.strip() for url in self.url.split(",") if url.strip()]


class EngineConfig(Section):
    kind: Literal["lockstep", "continuous", "vllm"] = key(
        "lockstep",
        "lockstep: all rollouts decoded together, reproducible; continuous: each as it asks; or vLLM; ignored for "
        "a URL",
    )
    temperature: float = key(1.0, "sampling temperature", gt=0)
    kv_tokens: int = key(
        0,
        "local engine: tokens in the KV cache; 0: on a GPU what fits, up to a quarter of its memory, on a CPU 131,072",
        ge=0,
    )
    precision: Precision = key("float32", "of the engine's weights; default: `train.precision`")
    draft: str = key("", "vLLM: folder of a draft head; empty: no speculative decoding (docs/mtp.md)")
    timeout_s: float = key(300.0, "timeout of one answer from a URL, and of any sign of life from vLLM", gt=0)
    vllm: VllmConfig = VllmConfig()


class LoraConfig(Section):
    """Low-rank adapters: they are trained instead of the weights."""

    rank: int = key(0, "rank of the adapters; 0: none, all weights are trained", ge=0)
    alpha: int = key(32, "adapters are scaled by alpha / rank", ge=1)
    targets: list[str] = key([], "layers with an adapter, as in `q_proj`; empty: all linear layers but the head")


class LinearConfig(Section):
    """How linear layers multiply: docs/precision.md."""

    kind: Literal["plain", "fp8"] = key(
        "plain",
        "`train.precision`, or FP8 (on GPUs that have it)",
    )


@dataclass(frozen=True)
class RanksConfig:
    """How the ranks of a run that torchrun starts share the weights: docs/scale.md."""

    replicate: int = 1  # copies of the weights; each is sharded over its ranks
    experts: int = 1  # ranks that share a layer's experts


class TrainConfig(Section):
    steps: int = key(30, "optimizer steps; a finished run may be trained further", ge=1)
    groups: int = key(4, "tasks per step", ge=1)
    group_size: int = key(8, "rollouts per task", ge=2)
    optimizer: Literal["adamw", "muon"] = key("adamw", "muon: matrices by Muon, the rest by AdamW")
    learning_rate: float = key(1e-6, "peak learning rate", gt=0)
    schedule: Literal["constant", "cosine", "linear", "wsd"] = key(
        "constant",
        "after warm-up; cosine and linear fall to a tenth over train.steps, wsd over the last fifth; raising "
        "train.steps later raises the rate again",
    )
    warmup_steps: int = key(3, "linear warm-up", ge=0)
    weight_decay: float = key(0.0, "decoupled, as in AdamW", ge=0)
    rl_weight: float = key(1.0, "of the RL loss; 0: no RL, only other losses (docs/methods.md)", ge=0)
    ratio_cap: float = key(2.0, "cap of the importance weight", ge=1)
    reference_kl: float = key(
        0.0, "KL penalty to the run's start: subtracted from each token's advantage (k1, a constant)", ge=0
    )
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop",
        "when a gradient is NaN or infinite: end the run, or skip the step",
    )
    no_signal_steps: int = key(
        3,
        "end the run after so many steps in a row without a signal (docs/feedback.md#metrics); 0: never",
        ge=0,
    )
    micro_tokens: int = key(0, "tokens per forward; 0: by memory, 8192 on a CPU", ge=0)
    recompute: Literal["auto", "none", "layers", "all"] = key(
        "auto",
        "activation checkpointing: none, layers without attention, layers; auto: the least that fits, none on a CPU",
    )
    compile: Literal["auto", True, False] = key("auto", "torch.compile; auto: on a GPU")
    precision: Precision = key("float32", "of the trained model; bfloat16 keeps float32 master weights")
    ranks: dict[Literal["replicate", "experts"], PositiveInt] = key(
        {},
        "under torchrun (docs/scale.md): `replicate`: copies of the weights, each sharded; `experts`: ranks that "
        "share a layer's experts",
    )
    linear: LinearConfig = LinearConfig()
    lora: LoraConfig = LoraConfig()

    @property
    def mesh(self) -> RanksConfig:
        return RanksConfig(**self.ranks)

    def settled(
        self, recompute: Literal["none", "layers", "all"] = "none", compile: bool = False, micro_tokens: int = 8192
    ) -> TrainConfig:
        """What was left to be chosen is this. By default what a CPU takes."""
        chosen = {
            "recompute": recompute if self.recompute == "auto" else self.recompute,
            "compile": compile if self.compile == "auto" else self.compile,
            "micro_tokens": self.micro_tokens or micro_tokens,
        }
        return self.model_copy(update=chosen)


class CheckpointConfig(Section):
    """Checkpoints are written during training and at its end."""

    every: int = key(0, "steps between checkpoints; 0: every step below 1 GB, else every 30 minutes", ge=0)
    keep: int = key(2, "newest checkpoints kept", ge=1)


class MtpConfig(Section):
    """`offbook mtp` trains a draft head: docs/mtp.md."""

    depth: int = key(3, "tokens ahead that the head learns", ge=1, le=16)
    learning_rate: float = key(1e-3, "peak learning rate", gt=0)
    steps: int = key(400, "training steps", ge=1)
    batch_tokens: int = key(8192, "tokens per step, about", ge=1)


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
    teacher: Literal["live", "ema", "frozen"] = key("frozen", "weights of the hinted model (docs/feedback.md)")
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


class StageConfig(Section):
    """Keys of every stage that learns from data."""

    data: list[str] = key([], "training data")
    epochs: int = key(1, "epochs, each in a new order", ge=1)
    batch_tokens: int = key(16_384, "tokens per step, about", ge=1)
    learning_rate: float = key(
        2e-5,
        "peak, after 3% warm-up; falls to a tenth: `sft` as a cosine, `pretrain` over the last fifth",
        gt=0,
    )
    validation_share: float = key(0.02, "share of tasks or repositories held out for validation", ge=0, lt=1)


class PretrainConfig(StageConfig):
    """Continued pretraining, `offbook pretrain`: docs/pretrain.md. Optimizer and precision are those of `train`."""

    data: list[str] = key(
        [],
        "repositories: folders, archives, git URLs, `pypi:NAME`, `pocket-code:200` (`pocket-code:50x4`: four "
        "packages each)",
    )
    batch_tokens: int = key(65_536, "tokens per step, about", ge=1)
    context: int = key(32_768, "tokens of a window; its files are of one repository", ge=16)
    rope: Literal["", "yarn"] = key(
        "",
        "RoPE scaling where `context` exceeds the model's; stored in checkpoints",
    )
    licences: list[str] = key(
        ["Apache-2.0", "BSD", "CC0-1.0", "ISC", "MIT", "PSF-2.0", "Unlicense", "Zlib"],
        "accepted licences; `any`: all, and none",
    )
    guard: list[str] = key(
        [],
        "suites, as in `offbook eval`: files with their solutions, and their repositories, are left out",
    )
    hold_out: list[str] = key([], "repositories to leave out")


class SftConfig(StageConfig):
    """Imitation, `offbook sft`: docs/sft.md. Optimizer, adapters and precision are those of `train`; conversations are
    limited by harness.context."""

    data: list[str] = key(
        [],
        "run folders, files of ATIF, OpenAI messages or chat, datasets by folder or name, `demos:DIR`, `pocket:6000`",
    )
    min_reward: Literal["any"] | float = key("any", "leave out rollouts that earned less")
    reminders: float = key(0.4, "share of rule-keeping messages with a reminder before them", ge=0, le=1)


class StagesConfig(Section):
    """Several stages in order, `offbook stages`."""

    order: list[Literal["fit", "pretrain", "long", "sft", "sample", "train", "eval"]] = key(
        ["pretrain", "long", "sft", "train"],
        "stages, each from the last one's model; one may come several times",
        min_length=1,
    )
    long: dict[str, int | float | str | list[str]] = key({}, "keys of `pretrain` that differ in the stage `long`")


class RayConfig(Section):
    """Rollouts on other machines: docs/scale.md."""

    samplers: int = key(0, "actors that sample, each with its own engine and sandboxes; 0: none", ge=0)
    address: str = key("", "of the cluster, or `auto`; empty: start Ray here")


class LoopConfig(Section):
    """Sampling during training: docs/async.md."""

    max_staleness: int = key(0, "steps by which sampling may run ahead; 0: synchronous; lockstep takes at most 1", ge=0)
    deadline_s: float = key(7200.0, "timeout of every wait without progress", gt=0)
    refill: int = key(
        0,
        "maximum groups per batch with equal rewards that are replaced; needs tasks.order select, and continuous "
        "or vLLM",
        ge=0,
    )
    store: str = key("", "folder or s3://bucket/prefix to publish every version to (docs/sync.md)")
    ray: RayConfig = RayConfig()


class LiveConfig(Section):
    """Learning from use: docs/live.md."""

    consent: Literal["none", "all"] = key(
        "none", "what is kept of a session and learned from: nothing, or all without secrets"
    )
    retention_days: float = key(30.0, "days before a kept session is deleted", gt=0)
    settle_s: float = key(86_400.0, "wait for reactions before a session is learned from", ge=0)
    sessions: int = key(256, "settled sessions of the deployed version per cycle", ge=2)
    user_share: float = key(0.25, "maximum share of a cycle from one user; 1: a user's own model", gt=0, le=1)
    weights: dict[str, float] = key(
        {
            "kept": 1.0,
            "reverted": 0.5,
            "dissatisfied": 0.5,
            "thumbs": 0.5,
            "interrupted": 0.25,
            "latency": 0.1,
            "broken_calls": 0.3,
            "dodged": 0.5,
        },
        "of the parts of a session's reward, each from -1 to 1 (docs/live.md)",
    )
    suites: list[str] = key([], "of the gate, added to the held-out tasks, as in `sides`")

    @field_validator("weights")
    @classmethod
    def _known(cls, weights: dict[str, float]) -> dict[str, float]:
        known = cls.model_fields["weights"].default
        for name, weight in weights.items():
            if name not in known or weight < 0:
                raise ValueError(f"{name} = {weight:g}: give {', '.join(known)} weights of 0 or more")
        return {**known, **weights}


class EvalConfig(Section):
    samples: int = key(2, "rollouts per held-out task", ge=1)


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
