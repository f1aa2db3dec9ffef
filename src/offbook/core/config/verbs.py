"""Which keys each verb reads. An option that a verb would ignore is refused; recipes and files may set more."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from offbook.core.config.files import ConfigError

RUN = ("out", "model", "seed", "threads")
ENGINE = ("engine", "harness", "tools", "train.precision", "train.linear", "loop.deadline_s")
ROLLOUTS = (*ENGINE, "tasks", "sandbox", "rewards", "monitors", "judge.url", "judge.name", "judge.monitors")
DEMOS = ("harness", "tools", "sandbox", "tasks.source", "tasks.heldout_share")
TRAINING = ("train", "checkpoint", "loop.deadline_s")
LIVE = (*ROLLOUTS, *TRAINING, "feedback", "judge", "eval", "live")
RL = (*ROLLOUTS, *TRAINING, "feedback", "judge.feedback", "teachers", "loop", "eval")
NO_RL = ("!train.rl_weight", "!train.ratio_cap")
OWN_SCHEDULE = ("!train.schedule", "!train.warmup_steps")
NO_SAMPLES = ("!feedback.corrections", "!feedback.look")
READ = {  # `plan` takes what any verb does; a `!` leaves a part of a section out
    "quickstart": RL,
    "rollout": ROLLOUTS,
    "serve": ENGINE,
    "agent": LIVE,
    "live": LIVE,
    "pretrain": (*TRAINING, *NO_RL, *OWN_SCHEDULE, "pretrain", "harness", "tasks"),
    "sft": (*TRAINING, *NO_RL, *OWN_SCHEDULE, "sft", *DEMOS, "feedback.rules", "feedback.files"),
    "demos": DEMOS,
    "mtp": ("mtp", "sft.data", "sft.min_reward", "harness", "engine", "train.precision", "train.micro_tokens"),
    "distill": (*TRAINING, *NO_SAMPLES, "feedback", "harness", "engine.temperature", "sft.min_reward"),
    "stages": (*RL, "pretrain", "sft", "stages"),
    "train": RL,
    "eval": (*ROLLOUTS, "eval", "train.lora", "loop.max_staleness"),  # the last decides which engines are allowed
}


def _stage(section: str) -> dict[str, str]:
    """The keys of `train` that a stage has its own of."""
    own = {
        "learning_rate": "learning_rate",
        "steps": "epochs",
        "groups": "batch_tokens",
        "group_size": "batch_tokens",
    }
    return {f"train.{key}": f"--{section}.{name}" for key, name in own.items()}


# Keys that look as if a verb read them, with the option that has the effect.
INSTEAD = {
    "rollout": {"tasks.source": "the argument TASKS"},
    "agent": {"train.steps": "--live.sessions"},
    "live": {"train.steps": "--live.sessions"},
    "pretrain": _stage("pretrain"),
    "sft": _stage("sft"),
    "mtp": {"train.steps": "--mtp.steps", "train.learning_rate": "--mtp.learning_rate"},
    "distill": {"train.steps": "--epochs"},
}


def refuse_without_effect(verb: str, given: Iterable[str]) -> None:
    """Refuse an option of the command line that `verb` does not read."""
    read = [place for place in READ.get(verb, ()) if not place.startswith("!")]
    left_out = [place[1:] for place in READ.get(verb, ()) if place.startswith("!")]
    for key in given:
        instead = INSTEAD.get(verb, {}).get(key)
        if instead:
            raise ConfigError(f"{key} has no effect on `offbook {verb}`; {instead} has")
        if read and (_is_in(key, left_out) or not _is_in(key, (*RUN, *read))):
            raise ConfigError(f"{key} has no effect on `offbook {verb}`, which reads {', '.join(read)}; leave it out")


def _is_in(key: str, places: Iterable[str]) -> bool:
    return any(f"{key}.".startswith(f"{place}.") for place in places)


def refuse_mistaken(verb: str, given: Collection[str]) -> None:
    """The same for a call from Python, where calls may share a configuration: refuse a key only where the one that has
    the effect is not given."""
    for key, instead in INSTEAD[verb].items():
        if key in given and instead.removeprefix("--") not in given:
            raise ConfigError(f"{key} has no effect on `{verb}`; {instead.removeprefix('--')} has")
