"""Tasks for small models: small repositories that are made up, features deleted from them."""

from offbook.taskgen.pocket.tasks import Draft, Level, draft_tasks, level_named, make_pocket_tasks

__all__ = ["Draft", "Level", "draft_tasks", "level_named", "make_pocket_tasks"]
