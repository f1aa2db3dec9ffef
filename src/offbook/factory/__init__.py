"""The task factory: a tested Python repository becomes validated feature-deletion tasks."""
