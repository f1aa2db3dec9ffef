"""Monitors that catch cheating: rules, a model, and a watch over the whole run. None sees the outcome."""

from offbook.monitors.policy import Monitors, monitors_of, withhold
from offbook.monitors.rules import KINDS, MONITORS, check

__all__ = ["KINDS", "MONITORS", "Monitors", "check", "monitors_of", "withhold"]
