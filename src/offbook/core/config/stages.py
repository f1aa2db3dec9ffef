"""Stages that learn from data, and which of them follow one another."""

from __future__ import annotations

from typing import Literal

from offbook.core.config.section import Section, key


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
