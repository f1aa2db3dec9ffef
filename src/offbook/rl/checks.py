"""What can be refused before torch is imported and a model is loaded."""

from __future__ import annotations

from offbook.agent.harness.own import own_tools
from offbook.agent.harness.toolsets import TOOLS, refuse_unknown
from offbook.core.config import Config, is_url
from offbook.rl.names import refuse_missing_model
from offbook.signals.feedback import rules_of
from offbook.signals.monitors.policy import Monitors, monitors_of
from offbook.signals.rewards import Rewards, compose
from offbook.types import OffbookError

Judges = tuple[Rewards, Monitors | None]


def refuse_run(config: Config, to_train: bool = False) -> None:
    """Refuse a model that is not there, and a rule, reward, monitor or tool that does not exist."""
    if to_train and is_url(config.model):
        raise OffbookError("a model behind a URL can be measured and not trained; give a model folder or a hub id")
    refuse_missing_model(config.model)
    judges_of(config)
    known = {*TOOLS, *own_tools(config.tools.files)}
    for name in config.tools.add:
        refuse_unknown(name, known, "tool")


def judges_of(config: Config) -> Judges:
    """Rewards and monitors, or one sentence about the rule, part, file or kind that there is not. Needs no model."""
    rules_of(config.feedback.files, config.feedback.rules, config.feedback.rule_weights)
    return compose(config.rewards, config.harness), monitors_of(config.monitors)
