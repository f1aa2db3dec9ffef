"""Stages that learn from data, and which of them follow one another."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from offbook.core.config.section import Section


class StageConfig(Section):
    """What stages that learn from data have in common."""

    data: list[str] = Field(default=[], description="what is learned from")
    epochs: int = Field(default=1, ge=1, description="times through the data, each in a new order")
    batch_tokens: int = Field(default=16_384, ge=1, description="of the rows of one step, about")
    learning_rate: float = Field(
        default=2e-5,
        gt=0,
        description="peak, after a warm-up of 3% of the steps; falls to a tenth: `sft` by a cosine, `pretrain` over "
        "the last fifth",
    )
    validation_share: float = Field(
        default=0.02, ge=0, lt=1, description="of the tasks, conversations or repositories, to measure the loss on"
    )


class PretrainConfig(StageConfig):
    """Continued pretraining on code, `offbook pretrain`: docs/pretrain.md. Precision, optimizer, clipping, decay and
    what one forward takes are those of `train`."""

    data: list[str] = Field(
        default=[],
        description="repositories: folders, archives, git URLs, `pypi:NAME`, `pocket-code:200`",
    )
    batch_tokens: int = Field(default=65_536, ge=1, description="of the windows of one step, about")
    context: int = Field(default=32_768, ge=16, description="tokens of a window, which has files of one repository")
    rope: Literal["", "abf", "yarn"] = Field(
        default="",
        description="stretching of positions if `context` exceeds what the model reads",
    )
    fim_share: float = Field(default=0.3, ge=0, le=1, description="of the code files, written to fill in the middle")
    licences: list[str] = Field(
        default=["Apache-2.0", "BSD", "CC0-1.0", "ISC", "MIT", "PSF-2.0", "Unlicense", "Zlib"],
        description="of repositories that are taken; `any` takes all, those without one too",
    )
    guard: list[str] = Field(
        default=[],
        description="suites whose solutions and repositories are left out",
    )
    hold_out: list[str] = Field(default=[], description="names of repositories that are not learned from")


class SftConfig(StageConfig):
    """Imitation, `offbook sft`. Precision, adapters, optimizer, clipping, decay and what one forward takes are those of
    `train`, the longest conversation is harness.context, and the rules that reminders state are feedback.rules."""

    data: list[str] = Field(
        default=[],
        description="run folders, ATIF, OpenAI messages, chat, datasets, `pocket:6000`",
    )
    min_reward: Literal["any"] | float = Field(default="any", description="leaves out rollouts that earned less")
    loss: Literal["nll", "dft"] = Field(
        default="nll", description="of a token: cross-entropy, or the same times its probability (DFT)"
    )
    references: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="of the conversations, shown their solution first, as OPSD's teacher is",
    )
    demonstrations: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="of the conversations, shown first what they say, as SDFT's teacher is",
    )
    reminders: float = Field(
        default=0.4, ge=0, le=1, description="of the messages that keep a rule, those with a reminder before them"
    )
    pairs: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="of the faulty messages, those that get the right one after a reminder, if the data has it",
    )
    hold_out_rules: list[str] = Field(default=[], description="no reminder states these")


class StagesConfig(Section):
    """One stage after the other, `offbook stages`."""

    order: list[Literal["pretrain", "long", "sft", "train"]] = Field(
        default=["pretrain", "long", "sft", "train"], min_length=1, description="which, each from the model of the last"
    )
    long: dict[str, int | float | str | list[str]] = Field(
        default={}, description="keys of `pretrain` that are others in the stage `long`"
    )
