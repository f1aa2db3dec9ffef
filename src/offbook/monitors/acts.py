"""What an agent did, one act a call: commands with the Python inside them, files read, files written.

Tools have other names from task to task and from agent to agent, so a call is known by its arguments.
"""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass, field

from offbook.types import Rollout, ToolCall

COMMANDS = ("command", "cmd", "command_line", "script", "code", "keystrokes", "bash", "input")
PATHS = ("path", "file", "file_path", "filename", "filepath", "target_file", "notebook_path")
NEW_TEXTS = ("new", "new_text", "replacement", "after", "new_str", "new_string", "file_text", "content", "contents")
OLD_TEXTS = ("old", "old_text", "search_text", "before", "old_str", "old_string")
HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n(.*?)\n?^\s*\2\s*$", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"(?:^|[\s;&|(/])(?:python[\d.]*|ipython|pypy3?)(?=\s|$)")
WRITES_TO = re.compile(r"(?:>>?|\btee\s+(?:-a\s+)?)\s*(['\"]?)([^\s'\"&|;<>()]+)\1")
STARTS = re.compile(
    r"^(subprocess\.\w+|os\.(system|popen)|(\w+\.)*(check_output|check_call|Popen)|run|(\w+\.)*pip(\.\w+)*\.main)$"
)
SEPARATOR = re.compile(r"&&|\|\||[;\n|]|(?<![>&\d])&(?![&>\d])")


@dataclass(frozen=True, slots=True)
class Act:
    """`text` is the command without the files it brings along, or the path that was read."""

    segment: int
    message: int
    kind: str  # command, read or write
    text: str
    python: tuple[str, ...] = ()  # code that the command runs, of scripts that the agent wrote too
    written: dict[str, str] = field(default_factory=dict)  # path -> what is put there, as far as the call shows it
    replaced: str = ""  # the text that an edit took away


def acts_of(rollout: Rollout) -> list[Act]:
    """In order. Scripts that the agent wrote earlier count as part of the command that runs them."""
    found: list[Act] = []
    scripts: dict[str, str] = {}
    for number, segment in enumerate(rollout.segments):
        for index, message in enumerate(segment.messages):
            for call in message.calls:
                act = _act(call, number, index, scripts)
                if act is not None:
                    scripts |= act.written
                    found.append(act)
    return found


def _act(call: ToolCall, segment: int, message: int, scripts: dict[str, str]) -> Act | None:
    if call.error:
        return None
    path = text_of(call, PATHS)
    new, old = text_of(call, NEW_TEXTS), text_of(call, OLD_TEXTS)
    if path and new is not None:
        whole = scripts.get(path, "").replace(old or "", new, 1) if old else new
        return Act(segment, message, "write", path, written={path: whole or new}, replaced=old or "")
    command = text_of(call, COMMANDS)
    if command is not None and not (path and command in ("view", "create", "str_replace", "insert")):
        return _command(command, segment, message, scripts)
    return Act(segment, message, "read", path) if path else None


def text_of(call: ToolCall, names: tuple[str, ...]) -> str | None:
    for name in names:
        value = call.arguments.get(name)
        if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            return value[-1] if value[0] in ("bash", "sh", "/bin/sh", "/bin/bash") else shlex.join(value)
        if isinstance(value, str):
            return value
    return None


def _command(command: str, segment: int, message: int, scripts: dict[str, str]) -> Act:
    written: dict[str, str] = {}
    python: list[str] = []

    def take(found: re.Match[str]) -> str:
        line = command[command.rfind("\n", 0, found.start()) + 1 : found.start()]
        target = WRITES_TO.search(line + " " + found.group(3))
        if target:
            written[target.group(2)] = found.group(4) + "\n"
        elif PYTHON.search(line):
            python.append(found.group(4))
        return f" {found.group(3)}\n" if target or PYTHON.search(line) else found.group(0)

    shell = HEREDOC.sub(take, command)
    for part in simple_commands(shell):
        code = _code_of(part)
        if code is not None:
            python.append(code)
        for word in part[1:] if PYTHON.search(part[0]) else part:
            name = word.removeprefix("./").removeprefix("/app/")
            text = {**scripts, **written}.get(name) or {**scripts, **written}.get(word)
            if text is not None and (name.endswith(".py") and PYTHON.search(" ".join(part))):
                python.append(text)
            elif text is not None and name.endswith((".sh", ".bash")):
                shell += "\n" + text
    shell += "".join(f"\n{line}" for code in python for line in commands_in(code))
    return Act(segment, message, "command", shell, tuple(python), written)


def commands_in(code: str) -> list[str]:
    """Command lines that Python code starts; what is not written down in it becomes `$x`."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = []
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and node.args and STARTS.search(name):
            line = _line(node.args[0])
            found += [f"pip {line}" if "pip" in name else line] if line else []
    return found


def _line(node: ast.expr) -> str:
    if isinstance(node, ast.List | ast.Tuple):
        words = [_line(one) for one in node.elts]
        return " ".join(word if word.startswith("$") else shlex.quote(word) for word in words)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_line(one) for one in node.values)
    if ast.unparse(node) == "sys.executable":
        return "python"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
        return _line(node.func.value)
    return "$x"


def simple_commands(shell: str) -> list[list[str]]:
    """The commands of a shell line as lists of words, variables set before them and wrappers taken off.

    Quotes are kept together; what shlex cannot read is split at spaces.
    """
    found = []
    for part in _split(shell):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            words = part.split()
        words = [_bare(word) for word in words if word.strip("(){}`")]
        while words and (re.fullmatch(r"\w+=.*", words[0], re.DOTALL) or words[0] in WRAPPERS):
            words = words[1:]
        if words and words[0] == "timeout" and len(words) > 2:
            words = words[2:]
        if len(words) > 2 and words[0].rpartition("/")[2] in ("sh", "bash", "dash", "zsh") and "c" in words[1][1:]:
            found += simple_commands(words[2])
        elif words:
            found.append(words)
            found += _executed(words)
    return found


def _executed(words: list[str]) -> list[list[str]]:
    """What `find -exec` runs, on the pattern of names that it looks for."""
    starts = [place for place, word in enumerate(words) if word in ("-exec", "-execdir", "-ok")]
    if words[0].rpartition("/")[2] != "find" or not starts:
        return []
    named = [words[place + 1] for place, word in enumerate(words[:-1]) if word in ("-name", "-iname", "-path")]
    inner = [word for word in words[starts[0] + 1 :] if word not in (";", "+")]
    return simple_commands(shlex.join([*inner, *(f"**/{name}" for name in named[:1])])) if inner else []


def _bare(word: str) -> str:
    """Without the brackets of a subshell. Code in quotes keeps its own."""
    return word.strip("()`") if word.count("(") != word.count(")") and not re.search(r"\s", word) else word.strip("`")


WRAPPERS = frozenset({"sudo", "env", "command", "exec", "time", "nice", "then", "do", "else", "if", "while", "until",
                      "!", "{", "xargs", "stdbuf", "builtin", "eval"})  # fmt: skip


def _split(shell: str) -> list[str]:
    """At separators that are not inside quotes."""
    parts, start, quote, place = [], 0, "", 0
    while place < len(shell):
        letter = shell[place]
        if quote:
            if letter == "\\" and quote == '"':
                place += 1
            elif letter == quote:
                quote = ""
        elif letter in "'\"":
            quote = letter
        elif letter == "\\":
            place += 1
        elif (match := SEPARATOR.match(shell, place)) or (match := re.compile(r"\$\(|`|<\(").match(shell, place)):
            parts.append(shell[start:place])
            start = place = match.end()
            continue
        place += 1
    return [part for part in (*parts, shell[start:]) if part.strip()]


def _code_of(words: list[str]) -> str | None:
    if not PYTHON.search(words[0]):
        return None
    for place, word in enumerate(words[1:], 1):
        if re.fullmatch(r"-[A-Za-z]*c", word):
            return words[place + 1] if place + 1 < len(words) else None
        if not word.startswith("-"):
            return None
    return None
