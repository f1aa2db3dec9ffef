"""Keys that each verb reads. An option that a verb would ignore is refused; recipes and files may set more."""

from __future__ import annotations

from collections.abc import Iterable

from offbook.core.config.files import ConfigError

RUN = ("out", "model", "seed", "threads")
ENGINE = (*RUN, "engine", "harness", "tools", "train.precision", "train.linear", "loop.deadline_s")
ROLLOUTS = (*ENGINE, "tasks", "sandbox", "rewards", "monitors", "judge.url", "judge.name", "judge.monitors")
DEMOS = (*RUN, "harness", "tools", "sandbox", "tasks.source", "tasks.heldout_share")
TRAINING = (*RUN, "train", "checkpoint", "loop.deadline_s")
LIVE = (*ROLLOUTS, *TRAINING, "feedback", "judge", "eval", "live", "!train.steps")
RL = (*ROLLOUTS, *TRAINING, "feedback", "judge.feedback", "teachers", "loop", "eval")
# A stage has its own batches and schedule, and no RL.
STAGE = (*TRAINING, *(f"!train.{key}" for key in (
    *("learning_rate", "steps", "groups", "group_size", "schedule", "warmup_steps"),
    *("rl_weight", "ratio_cap"),
)))  # fmt: skip
READ = {  # `plan` takes what any verb does; a `!` leaves a part of a section out
    "quickstart": RL,
    "fit": ROLLOUTS,
    "rollout": (*ROLLOUTS, "!tasks.source"),
    "serve": ENGINE,
    "agent": LIVE,
    "live": LIVE,
    "pretrain": (*STAGE, "pretrain", "harness", "tasks"),
    "sft": (*STAGE, "sft", *DEMOS, "feedback.rules", "feedback.files"),
    "mtp": (*RUN, "mtp", "sft.data", "sft.min_reward", "harness", "engine", "train.precision", "train.micro_tokens"),
    "distill": (*TRAINING, "!train.steps", "feedback", "!feedback.look", "harness",
                "engine.temperature", "sft.min_reward"),
    "stages": (*RL, "pretrain", "sft", "stages"),
    "train": RL,
    "eval": (*ROLLOUTS, "eval", "train.lora", "loop.max_staleness"),  # the last decides which engines are allowed
}  # fmt: skip


def refuse_without_effect(verb: str, given: Iterable[str]) -> None:
    """Refuse an option of the command line that `verb` does not read."""
    places = READ.get(verb, ())
    read = [place for place in places if not place.startswith("!")]
    for key in given:
        matching = [place for place in places if f"{key}.".startswith(f"{place.lstrip('!')}.")]
        if read and (not matching or any(place.startswith("!") for place in matching)):
            of = ", ".join(dict.fromkeys(place for place in read if place not in RUN))
            raise ConfigError(f"{key} has no effect on `offbook {verb}`, which reads {of}; leave it out")
