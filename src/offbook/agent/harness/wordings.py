"""Other names and words for the tools, as other harnesses have them. No name stands for two things."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wording:
    names: tuple[str, ...]
    parameters: dict[str, tuple[str, ...]]  # by the tool's own name of it
    descriptions: tuple[str, ...]


_FILE = ("file", "file_path", "filename")

WORDINGS = {
    "read_file": Wording(
        ("open_file", "view_file", "cat_file"),
        {"path": _FILE, "start": ("first_line", "start_line", "from"), "end": ("last_line", "end_line", "to")},
        (
            "Show what is in a file. Give a range of lines to see only a part; a long file is cut.",
            "Get the content of a file of the repository, or of some of its lines.",
        ),
    ),
    "edit_file": Wording(
        ("replace_in_file", "str_replace", "update_file"),
        {
            "path": _FILE,
            "old": ("old_text", "search_text", "before"),
            "new": ("new_text", "replacement", "after"),
            "edits": ("more_edits", "further", "and_then"),
        },
        (
            "Change a file by exact search and replace. What you search for has to be there once and only once; "
            "search for nothing to make a new file.",
            "Put one piece of text in the place of another. Copy the old text exactly as it is in the file, with "
            "enough around it to be unique. An empty old text makes a file that is not there yet.",
        ),
    ),
    "run_command": Wording(
        ("shell", "execute", "run_shell"),
        {"command": ("cmd", "command_line", "script"), "timeout": ("timeout_s", "seconds", "max_seconds")},
        (
            "Execute a command line with sh in the root of the repository. Nothing of it goes on once it returns.",
            "Use the shell. You get the output, and the exit code where it is not 0. Shells do not share any state.",
        ),
    ),
    "search_codebase": Wording(
        ("grep", "find_text", "search_files"),
        {
            "pattern": ("query", "regex", "text"),
            "path": ("folder", "within", "scope"),
            "ranked": ("by_relevance", "rank", "best_first"),
        },
        (
            "Find lines that match a Python regular expression in the files of the repository, or the files that "
            "speak most of some words.",
            "Look for text in the repository: a regular expression for exact matches, or words to rank files by.",
        ),
    ),
    "list_dir": Wording(
        ("list_files", "ls", "view_folder"),
        {"path": ("folder", "directory", "dir")},
        ("Show the names in a folder; a slash marks folders.", "What is in a folder of the repository?"),
    ),
    "run_tests": Wording(
        ("test", "check_tests", "execute_tests"),
        {"path": ("tests", "selection", "target")},
        (
            "Execute the tests, all or some of them. You see the last part of the report.",
            "See which tests of the repository pass.",
        ),
    ),
    "todo": Wording(
        ("plan", "write_plan", "update_todos"),
        {"items": ("todos", "steps", "entries")},
        (
            "Keep a list of what there is to do. Give all of it each time.",
            "Note the steps of your plan and how far each of them is; the list you give replaces the last one.",
        ),
    ),
    "finish": Wording(
        ("submit", "done", "complete_task"),
        {"message": ("summary", "note", "answer")},
        ("Say that the work is done. This is the last call.", "Hand in the repository as it is now and stop."),
    ),
}
