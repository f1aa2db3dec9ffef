"""Tasks: features deleted from repositories, verified by running the tests, kept as Harbor task folders."""

from offbook.tasks.folder import load_task, load_tasks
from offbook.tasks.pocket_tasks import Draft, draft_tasks, make_pocket_tasks

__all__ = ["Draft", "draft_tasks", "load_task", "load_tasks", "make_pocket_tasks"]
