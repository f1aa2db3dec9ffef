"""What judges rollouts by a configuration. No model is needed to make it, so a dry run makes it too."""

from __future__ import annotations

from offbook.config import Config
from offbook.feedback import refuse_unknown_rules
from offbook.monitors import Monitors, monitors_of
from offbook.rewards import Rewards, compose


def judges_of(config: Config) -> tuple[Rewards, Monitors | None]:
    """Rewards and monitors, or one sentence about the rule, part, file or kind that there is not."""
    refuse_unknown_rules(config.feedback.rules, config.feedback.rule_weights)
    return compose(config.rewards, config.harness), monitors_of(config.monitors)
