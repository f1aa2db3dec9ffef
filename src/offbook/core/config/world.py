"""Where the agent works: tasks, harness, tools and sandboxes, and the engine that it samples from."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from offbook.core.config.section import Precision, Section
from offbook.types import Limits


class TasksConfig(Section):
    """Where tasks come from. Of Harbor's and verifiers' tasks a fifth is held out."""

    source: str = Field(
        default="pocket",
        description="`pocket`, `pocket-long`, `pocket-long-3-8` (3 to 8 functions per task), a folder with `train/` "
        "and `heldout/`, a folder of Harbor tasks, or `verifiers:ID`",
    )
    num_train: int = Field(default=120, ge=1, description="pocket: training tasks")
    num_heldout: int = Field(default=48, ge=1, description="pocket: held-out tasks")
    heldout_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of a folder's tasks to hold out where it has no `heldout/`; they share code with the rest",
    )
    order: Literal["shuffle", "select"] = Field(
        default="shuffle",
        description="shuffle: epochs in random order; select: each task once, easy ones first, then by solve rate",
    )
    harden: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="select: recent solve rate from which harder variants of a task are made, as in 0.8; 0: never",
    )

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if self.harden and self.order != "select":
            raise ValueError("tasks.order is shuffle, so no harder task would be drawn; give --tasks.order select")
        return self


class HarnessConfig(Section):
    """Who works, within which limits, and with which tools."""

    command: str = Field(
        default="",
        description="your agent: a shell command in the sandbox, with the request in $OFFBOOK_INSTRUCTION "
        "(docs/serve.md); empty: offbook's agent",
    )
    mounts: dict[str, str] = Field(default={}, description="read-only folders for your agent: sandbox path to folder")
    turns: int = Field(default=30, ge=1, description="maximum messages of the agent")
    tokens: int = Field(default=131_072, ge=1, description="maximum tokens of all segments")
    context: int = Field(default=32_768, ge=1, description="maximum tokens of one segment")
    message_tokens: int = Field(default=2048, ge=1, description="maximum tokens of one message")
    summarize_at: int = Field(default=24_576, ge=0, description="tokens of a segment before a self-summary; 0: never")
    summary_tokens: int = Field(default=2048, ge=1, description="maximum tokens of a self-summary")
    command_s: float = Field(default=60.0, gt=0, description="timeout of one command")
    wall_s: float = Field(default=3600.0, gt=0, description="timeout of a rollout")
    prices: dict[Literal["input", "output"], Annotated[float, Field(ge=0)]] = Field(
        default={}, description="per million prompt tokens (`input`) and sampled tokens (`output`)"
    )
    profile: Literal["pocket", "standard", "worked", "bash"] = Field(
        default="standard",
        description="how tools are shown: described, by worked examples, as one shell, or in pocket's own way",
    )
    dialect: Literal["auto", "hermes", "xml", "json"] = Field(
        default="auto",
        description="how the model writes calls (docs/models.md); auto: as it was trained here, or as its chat "
        "template has them",
    )
    variation: float = Field(default=0.0, ge=0, le=1, description="how much tools differ between tasks")

    def limits(self) -> Limits:
        return Limits(**self.model_dump(include={field.name for field in dataclasses.fields(Limits)}))


class ToolsConfig(Section):
    """Your own tools, added to those of docs/tools.md."""

    files: list[str] = Field(default=[], description="Python files with your tools; they run with your rights")
    pages: list[str] = Field(
        default=[], description="folders of documentation for the tool `search_docs` (docs/tools.md)"
    )
    add: list[str] = Field(default=[], description="tools added to those of every task")


class SandboxConfig(Section):
    """The sandbox of a rollout and its limits."""

    backend: Literal["bwrap", "container", "process"] = Field(
        default="bwrap", description="`process` is no sandbox: for code you trust"
    )
    memory_mb: int = Field(default=2048, ge=64, description="memory of all processes in a sandbox")
    cpus: float = Field(default=0.0, ge=0, description="processor cores; 0: no limit")
    disk_mb: int = Field(default=512, ge=1, description="disk space")
    image: str = Field(default="", description="container: the image")


class VllmConfig(Section):
    """For `engine.kind` vllm: docs/engines.md."""

    url: str = Field(
        default="",
        description="a running server, or several, separated by commas; empty: start one",
    )
    copies: int = Field(
        default=1,
        ge=1,
        description="servers to start, each on `gpus` GPUs of its own",
    )
    python: str = Field(
        default="",
        description="interpreter or folder of vLLM's environment; empty: what `offbook doctor` finds",
    )
    gpus: int = Field(default=1, ge=1, description="GPUs that the model is spread over")
    gpu_share: Literal["auto"] | Annotated[float, Field(gt=0, le=1)] = Field(
        default="auto",
        description="share of each GPU's memory; auto: what `offbook plan` finds, 0.4 without training",
    )
    sleep: bool = Field(default=False, description="free that memory while the trainer works")
    start_s: float = Field(default=600.0, gt=0, description="timeout of a server's start")
    options: list[str] = Field(default=[], description="more of vLLM's command-line options")

    @property
    def given_urls(self) -> list[str]:
        """URLs of the servers that run already."""
        return [url.strip() for url in self.url.split(",")] if self.url else []

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if len({url.rstrip("/").removesuffix("/v1") for url in self.given_urls}) < len(self.given_urls):
            raise ValueError("engine.vllm.url has a server twice")
        if not all(self.given_urls):
            raise ValueError("engine.vllm.url has an empty one")
        if self.copies > 1 and self.given_urls:
            raise ValueError(
                "engine.vllm.copies are started by offbook; leave it out where engine.vllm.url names running servers"
            )
        return self


class EngineConfig(Section):
    kind: Literal["lockstep", "continuous", "vllm"] = Field(
        default="lockstep",
        description="lockstep: all rollouts decoded together, reproducible; continuous: each as it asks; or vLLM; "
        "ignored for a URL",
    )
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature")
    kv_tokens: int = Field(
        default=0,
        ge=0,
        description="local engine: tokens in the KV cache; 0: on a GPU what fits, up to a quarter of its memory, on "
        "a CPU 131,072",
    )
    precision: Precision = Field(default="float32", description="of the engine's weights; default: `train.precision`")
    draft: str = Field(
        default="", description="vLLM: folder of a draft head; empty: no speculative decoding (docs/mtp.md)"
    )
    timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="timeout of one answer from a URL, and of any sign of life from vLLM",
    )
    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if self.draft and self.kind != "vllm":
            raise ValueError("the local engine has no speculative decoding: engine.draft needs engine.kind vllm")
        return self
