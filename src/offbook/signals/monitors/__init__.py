"""Monitors that catch cheating: rules, a model, and a watch over the whole run. None sees the outcome.

What findings cost is in policy.py; a worker, which imports this, needs no more than the rules.
"""

from offbook.signals.monitors.rules import KINDS, MONITORS, check
