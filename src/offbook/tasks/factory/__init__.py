"""From repositories to tasks: a tested Python repository becomes verified feature-deletion tasks."""
