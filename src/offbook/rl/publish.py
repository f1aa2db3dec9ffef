"""Versions of the weights for engines that are nobody's rollouts, through a store (offbook.engine.sync)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offbook.core.config import Config
from offbook.engine.sync import Publisher, open_store
from offbook.train.trainer import Trainer

log = logging.getLogger(__name__)


def publisher_of(config: Config) -> Publisher | None:
    """Matrices are written as the engines sample with them."""
    if not config.loop.store:
        return None
    precision = getattr(torch, config.engine.precision)
    publisher = Publisher(open_store(config.loop.store), dtype=None if precision == torch.float32 else precision)
    publisher.look()  # before anything is trained
    return publisher


@contextmanager
def published(publisher: Publisher) -> Iterator[None]:
    """A store that is away ends no run: the next version carries all that changed."""
    try:
        yield
    except Exception as problem:
        log.warning("weights could not be published to %s: %s", publisher.store, problem)


def publish(publisher: Publisher | None, trainer: Trainer, version: int) -> None:
    """To engines elsewhere, which take it when they look. It is copied here and written beside what follows."""
    stored(publisher)
    if publisher is not None:
        publisher.publish(trainer.publish(version))


def stored(publisher: Publisher | None) -> None:
    """Waits for the last that was given to it."""
    if publisher is not None:
        with published(publisher):
            publisher.wait()
