"""Where the agent works: tasks, harness, tools and sandboxes, and the engine that it samples from."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from offbook.core.config.section import Precision, Section, key
from offbook.types import Limits


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
