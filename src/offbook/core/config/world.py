"""Where the agent works: tasks, harness, tools and sandboxes, and the engine that it samples from."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from offbook.core.config.section import Precision, Section
from offbook.types import Limits


class TasksConfig(Section):
    """Where tasks come from: `pocket` and `pocket-long` are made on the spot, a folder has `train/` and `heldout/` task
    folders. Of others' tasks, Harbor's or those of verifiers, about a fifth is held out."""

    source: str = Field(
        default="pocket",
        description="`pocket`, `pocket-long` (`pocket-long-3-8`: 3 to 8 functions per task), a folder with `train/` "
        "and `heldout/`, Harbor tasks, or `verifiers:ID`",
    )
    num_train: int = Field(default=120, ge=1, description="pocket only: how many to make")
    num_heldout: int = Field(default=48, ge=1, description="pocket only: how many to make")
    heldout_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="held-out share of a folder without `heldout/`; its code is not unseen",
    )
    order: Literal["shuffle", "select"] = Field(
        default="shuffle",
        description="shuffle: epochs; select: by what was solved, each task once",
    )
    harden: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="select only: the recent solve rate from which harder tasks are made during the run; 0 is never",
    )

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if self.harden and self.order != "select":
            raise ValueError("tasks.order is shuffle, so no harder task would be drawn; give --tasks.order select")
        return self


class HarnessConfig(Section):
    """The limits of one rollout, how its tools are shown, and what its tokens cost."""

    kind: Literal["own", "command"] = Field(
        default="own", description="who does the work: offbook's own agent, or a command of yours: docs/serve.md"
    )
    command: str = Field(
        default="",
        description="your agent's shell command; the request is in $OFFBOOK_INSTRUCTION",
    )
    mounts: dict[str, str] = Field(
        default={}, description="read-only folders of your agent, by their path in the sandbox"
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
        description="how tools are shown: docs/tools.md",
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
    """Your own tools: docs/tools.md."""

    files: list[str] = Field(default=[], description="Python files with your own; they run with your rights")
    pages: list[str] = Field(
        default=[], description="folders of documentation that every agent may search by `search_docs`: docs/tools.md"
    )
    add: list[str] = Field(default=[], description="tools for every task, on top of its own")


class SandboxConfig(Section):
    """Which kind of sandbox a rollout gets, and how much of the machine it may use."""

    backend: Literal["bwrap", "container", "process"] = Field(
        default="bwrap", description="`process` is no sandbox at all: for code you trust"
    )
    memory_mb: int = Field(default=2048, ge=64, description="of all processes of a sandbox together")
    cpus: float = Field(default=0.0, ge=0, description="cores' worth of processor time; 0 is no limit")
    disk_mb: int = Field(default=512, ge=1, description="that a sandbox may write")
    image: str = Field(default="", description="container only")


LAST_PORT = 65_535


class VllmConfig(Section):
    """vLLM, for `engine.kind` vllm: docs/engines.md. It computes in bfloat16; without a GPU in float32."""

    url: str = Field(default="", description="of a server that runs already; empty: offbook starts one")
    urls: list[str] = Field(default=[], description="of several that run already; rollouts of a group go to the same")
    copies: int = Field(
        default=1,
        ge=1,
        description="servers to start, each on `gpus` GPUs",
    )
    python: str = Field(
        default="",
        description="vLLM's interpreter or environment; empty: what `offbook doctor` finds",
    )
    port: int = Field(
        default=0, ge=0, le=LAST_PORT, description="on this machine alone; 0 is a free one; of copies, the first's"
    )
    gpus: int = Field(default=1, ge=1, description="that the model is spread over")
    gpu_share: Literal["auto"] | Annotated[float, Field(gt=0, le=1)] = Field(
        default="auto",
        description="of each GPU's memory; auto: by `offbook plan`, 0.4 without training",
    )
    sleep: bool = Field(default=False, description="give that memory back while the trainer works")
    start_s: float = Field(default=600.0, gt=0, description="that the server has to come up, each time")
    options: list[str] = Field(default=[], description="more of vLLM's own, as on its command line")

    @property
    def given_urls(self) -> list[str]:
        """Of all servers that run already."""
        return self.urls or ([self.url] if self.url else [])

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if self.url and self.urls:
            raise ValueError("engine.vllm.url and engine.vllm.urls are both given; put all of them into urls")
        if len({url.rstrip("/").removesuffix("/v1") for url in self.urls}) < len(self.urls):
            raise ValueError("engine.vllm.urls has a server twice")
        if not all(self.urls):
            raise ValueError("engine.vllm.urls has an empty one")
        if self.copies > 1 and self.given_urls:
            raise ValueError("engine.vllm.copies are started by offbook; leave it out beside servers that run already")
        if self.port and self.port + self.copies - 1 > LAST_PORT:
            raise ValueError(f"engine.vllm.copies take ports from {self.port} on, and {LAST_PORT} is the last there is")
        return self


class EngineConfig(Section):
    kind: Literal["local", "vllm"] = Field(default="local", description="what samples rollouts")
    temperature: float = Field(default=1.0, gt=0, description="that rollouts are sampled at")
    mode: Literal["lockstep", "continuous"] = Field(
        default="lockstep",
        description="local: lockstep repeats exactly; continuous waits for no other rollout",
    )
    kv_tokens: int = Field(
        default=0,
        ge=0,
        description="local: size of the KV cache in tokens; 0: what fits, up to a quarter of a GPU, or 131,072 on a "
        "CPU",
    )
    precision: Precision = Field(
        default="float32", description="of the engine's copy of the weights; where it is not given, train.precision"
    )
    linear: Literal["trained", "plain"] = Field(
        default="trained", description="local models: linear layers as train.linear says, or plain"
    )
    draft_tokens: int = Field(
        default=0,
        ge=0,
        le=16,
        description="vLLM: tokens drafted per step; 0 is off: docs/mtp.md",
    )
    draft: str = Field(default="", description="vLLM: the draft head's folder; empty: `draft` in the model's folder")
    timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="for an answer of a model behind a URL, and for any sign of life of vLLM",
    )
    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if self.draft and not self.draft_tokens:
            raise ValueError("engine.draft_tokens is 0, so engine.draft is never used; give a number, as in 3")
        if self.draft_tokens and self.kind == "local":
            raise ValueError("the local engine has no speculative decoding: engine.draft_tokens needs engine.kind vllm")
        return self
