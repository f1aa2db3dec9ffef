"""What can be set: one frozen tree. A value lives in one place.

Its defaults are for a model that reads and writes English; recipes/ has what other models need.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tomli_w
from pydantic import Field, field_validator, model_validator

from offbook.config.methods import CorrectionsConfig, TeachersConfig
from offbook.config.section import Schedule, Section, TeacherName
from offbook.config.stages import PretrainConfig, SftConfig, StagesConfig
from offbook.types import Limits

Precision = Literal["float32", "bfloat16"]
LOCAL = "local"  # in the place of a judge model's URL: it runs here


class TasksConfig(Section):
    """Where tasks come from: `pocket` and `pocket-long` are made on the spot, a folder has `train/` and `heldout/` task
    folders. Of others' tasks, Harbor's or those of verifiers, about a fifth is held out."""

    source: str = Field(
        default="pocket",
        description="`pocket`, `pocket-long` (several functions a task, `pocket-long-3-8` says how many), a folder "
        "with `train/` and `heldout/` task folders, a folder of Harbor tasks, or `verifiers:ID`, a taskset",
    )
    num_train: int = Field(default=120, ge=1, description="pocket only: how many to make")
    num_heldout: int = Field(default=48, ge=1, description="pocket only: how many to make")
    wording: Literal["", "terse", "normal", "detailed"] = Field(
        default="", description="which of a task's instructions the agent gets; empty: the one it was made with"
    )
    order: Literal["shuffle", "select"] = Field(
        default="shuffle",
        description="shuffle: epochs, each in a new order; select: by what was solved, and none twice",
    )
    repeat: bool = Field(
        default=True, description="shuffle only: tasks come again when all were trained on; if not, the run ends there"
    )

    harden: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="select only: the share of a task's rollouts that solve it from which harder ones are made of it "
        "during the run, as in 0.8; 0 is never",
    )

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if self.harden and self.order != "select":
            raise ValueError("tasks.order is shuffle, so no harder task would be drawn; give --tasks.order select")
        return self

    @field_validator("order", mode="before")
    @classmethod
    def _renamed(cls, order: object) -> object:
        """Run folders from before have the old word."""
        return "shuffle" if order == "walk" else order


class HarnessConfig(Section):
    """The limits of one rollout, how its tools are shown, and what its tokens cost."""

    kind: Literal["own", "command"] = Field(
        default="own", description="who does the work: offbook's own agent, or a command of yours: docs/serve.md"
    )
    command: str = Field(
        default="",
        description="your agent, as a shell command that runs in the box; what is asked for is in $OFFBOOK_INSTRUCTION",
    )
    mounts: dict[str, str] = Field(
        default={}, description="what your agent is made of: folders that boxes see, and can only read, by where"
    )
    turns: int = Field(default=30, ge=1, description="messages that the agent may write")
    tokens: int = Field(default=131_072, ge=1, description="of all segments together")
    context: int = Field(default=32_768, ge=1, description="tokens of one segment")
    message_tokens: int = Field(default=2048, ge=1, description="of one message")
    summarize_at: int = Field(default=24_576, ge=0, description="tokens of a segment before a self-summary; 0 is never")
    summary_tokens: int = Field(default=2048, ge=1, description="of a self-summary")
    command_s: float = Field(default=60.0, gt=0, description="seconds that one command may take")
    wall_s: float = Field(default=3600.0, gt=0, description="seconds that a rollout may take")
    cost: float = Field(default=0.0, ge=0, description="by the prices below; 0 is no limit")
    price_input: float = Field(default=0.0, ge=0, description="of a million prompt tokens")
    price_output: float = Field(default=0.0, ge=0, description="of a million sampled tokens")
    profile: Literal["pocket", "standard", "worked", "bash"] = Field(
        default="standard",
        description="how tools are shown: described, by worked turns, as one shell, or as the pocket model knows them",
    )
    variation: float = Field(default=0.0, ge=0, le=1, description="how much tools differ from task to task")

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if (self.kind == "command") != bool(self.command):
            missing = "--harness.command is empty" if self.kind == "command" else "--harness.kind is own"
            raise ValueError(f"{missing}: an agent of yours takes --harness.kind command and --harness.command COMMAND")
        return self

    def limits(self) -> Limits:
        return Limits(**self.model_dump(include={field.name for field in dataclasses.fields(Limits)}))


class ToolsConfig(Section):
    """Your own tools, beside those of docs/tools.md."""

    files: list[str] = Field(default=[], description="Python files with your own; they run with your rights")
    pages: list[str] = Field(
        default=[], description="folders of documentation that every agent may search by `search_docs`: docs/tools.md"
    )
    add: list[str] = Field(default=[], description="tools that every task's agent gets beside the ones of its task")


class SandboxConfig(Section):
    """Which kind of box a rollout gets, and how much of the machine it may use."""

    backend: Literal["bwrap", "container", "process"] = Field(
        default="bwrap", description="`process` is no box at all: for code you trust"
    )
    memory_mb: int = Field(default=2048, ge=64, description="of all processes of a box together")
    pids: int = Field(default=256, ge=8, description="processes and threads at once")
    cpus: float = Field(default=0.0, ge=0, description="cores' worth of processor time; 0 is no limit")
    disk_mb: int = Field(default=512, ge=1, description="that a box may write")
    image: str = Field(default="", description="container only")


class VllmConfig(Section):
    """vLLM, for `engine.kind` vllm: docs/engines.md. It computes in bfloat16; without a GPU in float32."""

    url: str = Field(default="", description="of a server that runs already; empty: offbook starts one")
    python: str = Field(
        default="",
        description="the interpreter, or the folder, of vLLM's environment; empty: what `offbook doctor` finds",
    )
    port: int = Field(default=0, ge=0, le=65_535, description="on this machine alone; 0 is a free one")
    gpus: int = Field(default=1, ge=1, description="that the model is spread over")
    gpu_share: Literal["auto"] | Annotated[float, Field(gt=0, le=1)] = Field(
        default="auto",
        description="of each GPU's memory, above 0, at most 1; auto is what `offbook plan` finds beside the trainer, "
        "and 0.4 where nothing is trained",
    )
    sleep: bool = Field(default=False, description="give that memory back while the trainer works")
    start_s: float = Field(default=600.0, gt=0, description="that the server has to come up, each time")
    options: list[str] = Field(default=[], description="more of vLLM's own, as on its command line")


class EngineConfig(Section):
    kind: Literal["local", "vllm"] = Field(
        default="local", description="what samples rollouts: offbook itself, or vLLM; a model behind a URL needs none"
    )
    temperature: float = Field(default=1.0, gt=0, description="that rollouts are sampled at")
    mode: Literal["lockstep", "continuous"] = Field(
        default="lockstep",
        description="local models: all rollouts decoded together, the same on every run; or each as soon as it asks",
    )
    kv_tokens: int = Field(
        default=0,
        ge=0,
        description="local models: tokens whose keys and values are held; 0 is a quarter of a GPU's free memory, or"
        " 131,072 on a CPU",
    )
    precision: Precision = Field(
        default="float32", description="of the engine's copy of the weights; where it is not given, train.precision"
    )
    draft_tokens: int = Field(
        default=0,
        ge=0,
        le=16,
        description="tokens that a draft head writes ahead, for the model to read at once; 0 is no drafts: docs/mtp.md",
    )
    draft: str = Field(
        default="", description="the draft head's folder; empty: `draft` in the model's, as `offbook train` leaves it"
    )
    timeout_s: float = Field(
        default=300.0, gt=0, description="that a model behind a URL has for one answer, and vLLM for any of many"
    )
    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if self.draft and not self.draft_tokens:
            raise ValueError("engine.draft_tokens is 0, so engine.draft is never used; give a number, as in 3")
        return self


class LoraConfig(Section):
    """Low-rank adapters: they are trained, and the weights under them stay."""

    rank: int = Field(default=0, ge=0, description="of the adapters; 0 is none: all weights are trained")
    alpha: int = Field(default=32, ge=1, description="what an adapter adds is scaled by alpha / rank")
    targets: list[str] = Field(
        default=[], description="names of the layers that get one, as in `q_proj`; empty: all linear ones but the head"
    )
    parameters: list[str] = Field(
        default=[], description="of fused experts, as in `mlp.experts.gate_up_proj`: matrices that get one too"
    )

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if not self.rank and (self.targets or self.parameters):
            raise ValueError("train.lora.rank is 0, so there are no adapters to put on anything; give a rank, as in 16")
        return self


class RanksConfig(Section):
    """How weights lie on the ranks of a run that torchrun starts: docs/scale.md. Of one process they say nothing."""

    replicate: int = Field(default=1, ge=1, description="copies of the weights; each lies sharded on its ranks")
    experts: int = Field(default=1, ge=1, description="ranks that a layer's experts are dealt out to")
    context: int = Field(default=1, ge=1, description="ranks that share a row of tokens")


class TrainConfig(Section):
    steps: int = Field(default=30, ge=1, description="optimizer steps; a finished run may be trained further")
    groups: int = Field(default=4, ge=1, description="tasks a step")
    group_size: int = Field(default=8, ge=2, description="rollouts a task")
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: for matrices, with AdamW for the rest"
    )
    learning_rate: float = Field(default=1e-6, gt=0, description="the highest; `schedule` says what becomes of it")
    schedule: Schedule = Field(
        default="constant",
        description="after the warm-up; cosine and linear fall over all of train.steps, wsd over the last fifth: a "
        "finished run that is trained further falls anew, from higher up",
    )
    warmup_steps: int = Field(default=3, ge=0, description="over which the learning rate rises in a line")
    final_share: float = Field(default=0.1, ge=0, le=1, description="of the learning rate, where cosine and linear end")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled, as in AdamW")
    gradient_clip: float = Field(default=1.0, gt=0, description="the most that the gradient's norm may be")
    rl_weight: float = Field(
        default=1.0, ge=0, description="of the RL loss; 0: no RL, only what teaches beside it (docs/methods.md)"
    )
    ratio_cap: float = Field(default=2.0, ge=1, description="cap of the importance weight")
    reference_kl: float = Field(
        default=0.0,
        ge=0,
        description="taken from the advantage of each token, times log(policy / the run's start) there (k1, detached)",
    )
    log_parts: int = Field(
        default=0,
        ge=0,
        description="steps between reports of `PART/gradient_norm`, the norm of each loss part's gradient by itself; "
        "such a step takes a backward pass a part; 0 is never",
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="what a step does whose gradient is no number: end the run, or change nothing"
    )
    micro_tokens: int = Field(
        default=0, ge=0, description="tokens in one forward; 0 follows from the memory there is, and is 8192 on a CPU"
    )
    recompute: Literal["auto", "none", "layers", "all"] = Field(
        default="auto",
        description="in the backward pass, to save memory: nothing, layers but for attention, layers; auto is the "
        "least that `offbook plan` finds room for, and none on a CPU",
    )
    compile: Literal["auto", True, False] = Field(default="auto", description="fuse kernels; auto does so on a GPU")
    precision: Precision = Field(
        default="float32",
        description="of the model that is trained; with bfloat16 the optimizer steps on float32 master weights",
    )
    lora: LoraConfig = LoraConfig()
    ranks: RanksConfig = RanksConfig()

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


class JudgeConfig(Section):
    """A model that reads rollouts, too."""

    url: str = Field(default="", description="of a server; for feedback also `local`: it runs here; empty is none")
    name: str = Field(
        default="", description="its name there; with `local` as in `model`, empty: the one that is being trained"
    )
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
    turns: int = Field(default=12, ge=1, description="replies that it may take for a rollout")
    tokens: int = Field(default=60_000, ge=1000, description="and tokens, prompts included, about")


class AuditorConfig(AgentConfig):
    """A model that audits rollouts."""

    rate: float = Field(default=0.0, ge=0, le=1, description="share of the rollouts that it reads")

    def idle(self, section: str, is_on: bool) -> str:
        return JudgeConfig(url=self.url, name=self.name, rate=self.rate).idle(section, is_on)


class FeedbackConfig(Section):
    """Targeted hints. `weight` 0 turns them off: RL alone."""

    method: Literal["targeted", "sdpo"] = Field(
        default="targeted",
        description="targeted: a hint right before each faulty message teaches that message; sdpo: all hints of a "
        "rollout before its first message teach the whole response",
    )
    weight: float = Field(default=1.0, ge=0, description="lambda, beside an RL loss of weight 1")
    balance: Literal["own", "rl", "bounded"] = Field(
        default="rl",
        description="what the hints' sum is divided by: own: the tokens they teach; rl: the step's RL tokens, so that "
        "it fades as faults get rare; bounded: the same, and the norm of its gradient is at most `bound` times RL's",
    )
    bound: float = Field(default=1.0, gt=0, description="`balance` bounded only: times the norm of RL's gradient")
    anneal_steps: int = Field(default=0, ge=0, description="steps over which `weight` moves to `anneal_to`; 0 is never")
    anneal_to: float = Field(default=0.0, ge=0, description="what `weight` is after `anneal_steps`")
    rule_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="by rule, on top of `weight`; 1 where not named, 0 turns a rule off"
    )
    rules: list[str] = Field(default=[], description="those of docs/feedback.md that are looked for; empty: all")
    files: list[str] = Field(default=[], description="Python files with your own rules; they run with your rights")
    max_targets: int = Field(default=3, ge=1, description="faulty messages of a rollout whose hint may teach")
    max_candidates: int = Field(default=6, ge=1, description="faulty messages of a rollout that are given a hint")
    gate: float = Field(
        default=0.002,
        ge=0,
        description="nats a token by which a hint has to move its message, and away from it; 0 is no gate",
    )
    look: bool = Field(
        default=True,
        description="before step 1: sample messages with and without each hint where a rule was broken; what does not "
        "help is not taught, and a run in which nothing helps ends there",
    )
    look_every: int = Field(default=0, ge=0, description="steps after which that is done again; 0 is never")
    look_samples: int = Field(default=8, ge=1, description="messages sampled at each place, without and with the hint")
    control: Literal["", "none", "donor", "random_target", "every_turn", "constant_negative"] = Field(
        default="", description="what stands in for the hint, to compare with: docs/feedback.md; empty is nothing"
    )
    anchor_share: float = Field(
        default=0.0, ge=0, le=1, description="of the targets, whose hinted reading is held where it was at the start"
    )
    anchor_weight: float = Field(default=1.0, gt=0, description="beside an RL loss of weight 1")
    anchor_tokens: int = Field(default=4096, ge=1, description="longer contexts are not held: they would cost the most")
    top: int = Field(default=5, ge=1, description="likeliest tokens recorded where student and teacher differ")
    teacher: TeacherName = Field(default="frozen", description="whose weights the hinted model has: docs/feedback.md")
    ema_decay: float = Field(default=0.99, gt=0, lt=1, description="teacher `ema` only")
    refresh_steps: int = Field(
        default=0, ge=0, description="teacher `frozen` only: steps until it takes the student's weights; 0 is never"
    )
    trust_mix: float = Field(default=0.1, gt=0, lt=1, description="teacher `trust_region` only: share of the live one")
    direction: Literal["forward", "reverse", "jsd"] = Field(
        default="forward", description="forward is KL(teacher || student), reverse the other way round"
    )
    token_cap: float = Field(default=2.0, gt=0, description="nats a token may count for")
    importance_cap: float = Field(default=0.0, ge=0, description="weight by min(pi / mu, cap); 0 is no weighting")
    judge: JudgeConfig = JudgeConfig()
    corrections: CorrectionsConfig = CorrectionsConfig()

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        """Settings that look as if they did something."""
        if problem := self._idle():
            raise ValueError(problem)
        return self

    def _idle(self) -> str:
        if self.anneal_to and not self.weight:
            return "feedback.weight is 0, so hints are off and feedback.anneal_to is never used; give a weight above 0"
        if self.anneal_to and not self.anneal_steps:
            return "feedback.anneal_steps is 0, so the weight never gets to feedback.anneal_to; give a number of steps"
        if self.threshold and self.max_candidates < self.max_targets:
            reached = f"feedback.max_targets = {self.max_targets} cannot be reached"
            return f"feedback.max_candidates is {self.max_candidates}, so {reached}; give at least as many candidates"
        if self.balance != "bounded" and self.bound != type(self).model_fields["bound"].default:
            way = "give --feedback.balance bounded"
            return f"feedback.balance is {self.balance}, so feedback.bound is never used; {way}"
        if self.look_every and not self.look:
            return "feedback.look is false, so feedback.look_every is never used; give --feedback.look true"
        return self.judge.idle("feedback", bool(self.weight))

    def is_look_due(self, step: int) -> bool:
        """Not under a control, which is there to show what another hint does, nor where hints stand elsewhere."""
        is_on = self.look and self.weight and not self.control and self.method == "targeted"
        return bool(is_on) and (step == 1 or bool(self.look_every and (step - 1) % self.look_every == 0))

    @property
    def threshold(self) -> float:
        """The gate, which controls go without: it would take away what they are there to show."""
        return 0.0 if self.control else self.gate


class EffortConfig(Section):
    """What solving costs: C(x) of docs/rewards.md, where x is the weighted share of what the limits allow."""

    on: bool = Field(default=False, description="whether solving costs anything")
    bound: float = Field(default=0.2, gt=0, lt=1, description="the most it can cost; solving is worth 1")
    k: float = Field(default=4.0, gt=0, description="of C(x): how early the cost levels off")
    q: float = Field(default=1.0, description="of C(x): how much it levels off; 1 is the logarithm")
    full_tokens: int = Field(default=0, ge=0, description="what counts as all tokens; 0 is harness.tokens")
    full_turns: int = Field(default=0, ge=0, description="what counts as all turns; 0 is harness.turns")
    thinking_tokens: float = Field(default=1.0, ge=0, description="weight of a share of all tokens, as the next four")
    call_tokens: float = Field(default=1.0, ge=0, description="weight of tokens in calls")
    output_tokens: float = Field(default=0.25, ge=0, description="the agent asked for them and did not write them")
    final_tokens: float = Field(default=1.0, ge=0, description="weight of tokens in messages without a call")
    summary_tokens: float = Field(default=1.0, ge=0, description="weight of tokens in self-summaries")
    calls: float = Field(default=0.25, ge=0, description="weight of a share of all turns, as the next")
    turns: float = Field(default=0.25, ge=0, description="weight of a share of all turns")


class RewardsConfig(Section):
    """What a rollout earns. Beside the outcome every part is off until it has a weight."""

    partial: bool = Field(default=False, description="credit for some of the tests that need the feature")
    grade_s: float = Field(default=120.0, gt=0, description="how long the hidden tests of one rollout may take")
    perturbed: Literal["off", "finding", "outcome"] = Field(
        default="finding",
        description="another result than the gold's for most of the changed inputs: what it counts as",
    )
    weights: dict[str, float] = Field(default={}, description="by name: a behaviour of docs/rewards.md or your own")
    files: list[str] = Field(default=[], description="Python files with your own; they run with your rights")
    effort: EffortConfig = EffortConfig()
    judge: AgentConfig = AgentConfig()


class MonitorsConfig(Section):
    """What looks for cheating in every rollout, and what a finding costs."""

    on: bool = Field(default=True, description="whether rollouts are searched for cheating")
    watch: bool = Field(default=True, description="let boxes tell which files are opened, where the machine can")
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


class CheckpointConfig(Section):
    """They are written beside training, and at the end of a run. Without `every` and `minutes`: after every step where
    one is below 1 GB, else every 30 minutes."""

    every: int = Field(default=0, ge=0, description="steps between checkpoints; 0 leaves it to `minutes`")
    minutes: float = Field(default=0.0, ge=0, description="between checkpoints, at the end of a step; 0 is not by time")
    keep: int = Field(default=2, ge=1, description="newest checkpoints kept")


class RayConfig(Section):
    """Rollouts on other machines, by Ray: docs/scale.md."""

    samplers: int = Field(
        default=0, ge=0, description="actors that sample, each with an engine and boxes of its own; 0: all is done here"
    )
    cpus: float = Field(default=1.0, ge=0, description="of each sampler")
    gpus: float = Field(default=0.0, ge=0, description="of each sampler")
    address: str = Field(default="", description="of the cluster, or `auto`; empty: Ray is started on this machine")


class MtpConfig(Section):
    """A draft head: `offbook mtp` trains one, and `offbook train` goes on with it beside the model: docs/mtp.md."""

    along: bool = Field(default=False, description="train the head of the engine along with the model")
    loss: Literal["kl", "tv", "ce"] = Field(
        default="kl",
        description="to the model's own distribution: KL(model || head), or total variation; ce: to the tokens",
    )
    depth: int = Field(default=3, ge=1, le=16, description="tokens ahead that it learns to draft")
    learning_rate: float = Field(default=1e-3, gt=0, description="the highest; of `along` all the time")
    steps: int = Field(default=400, ge=1, description="`offbook mtp` only, as the next")
    batch_tokens: int = Field(default=8192, ge=1, description="of one step, about")


class LoopConfig(Section):
    """Sampling beside training: docs/async.md."""

    max_staleness: int = Field(
        default=0,
        ge=0,
        description="steps that a rollout may begin before the one that it is trained in; 0: training waits for "
        "rollouts, and they for it; lockstep takes at most 1",
    )
    deadline_s: float = Field(
        default=7200.0, gt=0, description="without any sign of life, after which a run ends and says what it waited for"
    )
    eval_every: int = Field(
        default=0, ge=0, description="steps between evaluations on the held-out tasks, beside training; 0 is never"
    )
    store: str = Field(
        default="",
        description="a folder or s3://bucket/prefix that every version of the weights is published to as well, for "
        "engines elsewhere: docs/sync.md",
    )
    ray: RayConfig = RayConfig()


class LiveConfig(Section):
    """Learning from use: docs/live.md."""

    consent: Literal["none", "numbers", "all"] = Field(
        default="numbers",
        description="what of a session is kept: nothing; what can be counted, without a word that was said; or all of "
        "it, without secrets. Only `all` can be learned from",
    )
    retention_days: float = Field(default=30.0, gt=0, description="after which what was kept of a session is deleted")
    settle_s: float = Field(
        default=86_400.0, ge=0, description="that reactions have to come in before a session is learned from"
    )
    sessions: int = Field(default=256, ge=2, description="of the deployed version, settled, that a cycle learns from")
    batch: int = Field(default=32, ge=2, description="sessions an optimizer step")
    weights: dict[str, float] = Field(
        default={
            "kept": 1.0,
            "reverted": 0.5,
            "dissatisfied": 0.5,
            "thumbs": 0.5,
            "interrupted": 0.25,
            "latency": 0.1,
            "broken_calls": 0.3,
            "dodged": 0.5,
        },
        description="of the parts of a session's reward, each between -1 and 1: docs/live.md",
    )
    latency_s: float = Field(default=600.0, gt=0, description="that cost all of the part `latency`")
    hints: bool = Field(
        default=True,
        description="teach what dissatisfied users said, as hints at the messages that it is about; rules teach anyway",
    )
    first: Literal["share", "shadow"] = Field(
        default="share",
        description="what a version that passed the gate gets first: a share of the users, or the same requests unseen",
    )
    share: float = Field(default=0.2, gt=0, le=0.5, description="of the users, by hash, or of the requests in shadow")
    trial: int = Field(default=50, ge=1, description="users of each of the two versions after which it gets the rest")
    alpha: float = Field(
        default=0.05, gt=0, lt=1, description="the chance that a gate, or a trial, refuses a version that is no worse"
    )
    suites: list[str] = Field(default=[], description="of the gate, beside the held-out tasks, as in `sides`")
    populations: list[str] = Field(
        default=[], description="keys of users who get an adapter of their own each; needs train.lora.rank"
    )

    @field_validator("weights")
    @classmethod
    def _known(cls, weights: dict[str, float]) -> dict[str, float]:
        known = cls.model_fields["weights"].default
        for name, weight in weights.items():
            if name not in known or weight < 0:
                raise ValueError(f"{name} = {weight:g}: give {', '.join(known)} weights of 0 or more")
        return {**known, **weights}


class EvalConfig(Section):
    samples: int = Field(default=2, ge=1, description="rollouts a held-out task")


class Config(Section):
    out: str = Field(default="runs/train", description="the run folder")
    model: str = Field(
        default="", description="`pocket`, `pocket-moe`, `smollm2-135m`, a run or model folder, a hub id, or a URL"
    )
    seed: int = Field(default=0, description="of everything that is drawn")
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
        if not isinstance(harness, dict) or harness.get("kind") != "command" or not isinstance(feedback, dict):
            return tree
        return {**tree, "feedback": {"look": False, **feedback}}

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if self.harness.kind == "command":
            if self.feedback.look:
                raise ValueError(
                    "feedback.look answers by offbook's own tools: with harness.kind command leave it false"
                )
            if self.engine.kind == "local" and self.engine.mode == "lockstep":
                raise ValueError("your agents ask when they like: harness.kind command needs engine.mode continuous")
            if self.sandbox.backend == "container":
                raise ValueError("harness.kind command does not work in containers: leave sandbox.backend bwrap")
        if self.tools.add and self.harness.profile == "bash":
            raise ValueError("the profile bash has one tool, so tools.add is never used; take another harness.profile")
        if self.loop.ray.samplers and (problem := self._unfit_elsewhere()):
            raise ValueError(f"loop.ray.samplers is {self.loop.ray.samplers}, and {problem}")
        if self.live.populations and not self.train.lora.rank:
            raise ValueError("live.populations get an adapter each: give --train.lora.rank, as in 16")
        if self.mtp.along and not (self.engine.draft_tokens and self.engine.kind == "local"):
            raise ValueError(
                "mtp.along is for the head of a local engine; give it drafts, as in --engine.draft_tokens 3"
            )
        if self.loop.max_staleness and (problem := self._unfit_beside_training()):
            raise ValueError(f"loop.max_staleness is {self.loop.max_staleness}, and {problem}")
        return self

    def _unfit_elsewhere(self) -> str:
        """What cannot be where samplers have the engine."""
        judge = self.feedback.judge
        if self.engine.kind == "local" and self.train.lora.rank:
            return "a local engine elsewhere takes no adapters; give --engine.kind vllm, or --train.lora.rank 0"
        if self.engine.kind == "vllm" and self.engine.vllm.url:
            return "each starts a vLLM of its own; leave engine.vllm.url out"
        if self.feedback.weight and judge.url == LOCAL and not judge.name:
            return "the judge has no engine here to read with; give feedback.judge.name another model"
        return ""

    def _unfit_beside_training(self) -> str:
        """What cannot be while the trainer works and weights change in the middle of rollouts."""
        engine, judge = self.engine, self.feedback.judge
        if engine.kind == "local" and engine.mode == "lockstep" and self.loop.max_staleness > 1:
            return "lockstep samples one batch at a time; give 1, or --engine.mode continuous"
        if engine.kind == "vllm" and engine.vllm.sleep:
            return "vLLM is to sleep while the trainer works; give --engine.vllm.sleep false"
        if self.feedback.weight and judge.url == LOCAL and not judge.name:
            return "the judge would read with weights that change; give feedback.judge.name another model"
        return ""

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump())


def cache_folder() -> Path:
    """Where things made on the spot are kept: $OFFBOOK_CACHE, or offbook in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "offbook"
    return Path(os.environ.get("OFFBOOK_CACHE", default))


def is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))
