"""Stages that learn from data, and which of them follow one another."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from offbook.core.config.section import Section


class StageConfig(Section):
    """Keys of every stage that learns from data."""

    data: list[str] = Field(default=[], description="training data")
    epochs: int = Field(default=1, ge=1, description="epochs, each in a new order")
    batch_tokens: int = Field(default=16_384, ge=1, description="tokens per step, about")
    learning_rate: float = Field(
        default=2e-5,
        gt=0,
        description="peak, after 3% warm-up; falls to a tenth: `sft` as a cosine, `pretrain` over the last fifth",
    )
    validation_share: float = Field(
        default=0.02, ge=0, lt=1, description="share of tasks or repositories held out for validation"
    )


class PretrainConfig(StageConfig):
    """Continued pretraining, `offbook pretrain`: docs/pretrain.md. Optimizer and precision are those of `train`."""

    data: list[str] = Field(
        default=[],
        description="repositories: folders, archives, git URLs, `pypi:NAME`, `pocket-code:200` (`pocket-code:50x4`: "
        "four packages each)",
    )
    batch_tokens: int = Field(default=65_536, ge=1, description="tokens per step, about")
    context: int = Field(default=32_768, ge=16, description="tokens of a window; its files are of one repository")
    rope: Literal["", "abf", "yarn"] = Field(
        default="",
        description="RoPE scaling where `context` exceeds the model's; stored in checkpoints",
    )
    licences: list[str] = Field(
        default=["Apache-2.0", "BSD", "CC0-1.0", "ISC", "MIT", "PSF-2.0", "Unlicense", "Zlib"],
        description="accepted licences; `any`: all, and none",
    )
    guard: list[str] = Field(
        default=[],
        description="suites, as in `offbook eval`: files with their solutions, and their repositories, are left out",
    )
    hold_out: list[str] = Field(default=[], description="repositories to leave out")


class SftConfig(StageConfig):
    """Imitation, `offbook sft`: docs/sft.md. Optimizer, adapters and precision are those of `train`; conversations are
    limited by harness.context."""

    data: list[str] = Field(
        default=[],
        description="run folders, files of ATIF, OpenAI messages or chat, datasets by folder or name, `demos:DIR`, "
        "`pocket:6000`",
    )
    min_reward: Literal["any"] | float = Field(default="any", description="leave out rollouts that earned less")
    loss: Literal["nll", "dft"] = Field(
        default="nll", description="cross-entropy (`nll`), or weighted by the token's probability (`dft`)"
    )
    reminders: float = Field(
        default=0.4, ge=0, le=1, description="share of rule-keeping messages with a reminder before them"
    )


class StagesConfig(Section):
    """Several stages in order, `offbook stages`."""

    order: list[Literal["fit", "pretrain", "long", "sft", "sample", "train", "eval"]] = Field(
        default=["pretrain", "long", "sft", "train"],
        min_length=1,
        description="stages, each from the last one's model; one may come several times",
    )
    long: dict[str, int | float | str | list[str]] = Field(
        default={}, description="keys of `pretrain` that differ in the stage `long`"
    )
