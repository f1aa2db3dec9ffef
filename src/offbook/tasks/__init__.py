"""What a task is: Harbor task folders, running their tests, grading, checking."""

from offbook.tasks.folder import load_task, load_tasks
