"""Tasks for the pocket model: small repositories that are made up, features deleted from them."""

from offbook.taskgen.pocket.tasks import Draft, draft_tasks, make_pocket_tasks

__all__ = ["Draft", "draft_tasks", "make_pocket_tasks"]
