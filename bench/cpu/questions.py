"""Questions with four answers of which a program knows the right one, of any length: of models before agents.

    state    a file, then diffs of it: which value has a name now?
    api      a module's source, then a call of one of its functions: which arguments does it take?
    needle   a constant in a long file: which value has it? By the length of the file
    recall   files of repositories, then the name of a function of one of them: how does the definition continue? By
             the length of all files, and without them (`recall/none`): what is right there was guessed or known

The model's answer is the one with the highest log-probability per byte; chance is a quarter.

The context of a recall question is made of real files, each after its path as in pretraining, repository after
repository until the length is reached, and of generated files where there are too few. The other answers are
definitions in other files of the same context, so the right one can only be found by looking the name up.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, permutations

from offbook.evals.base import TextModel
from offbook.train.forward import token_logprobs
from offbook.types import is_test_file

NAMES = (
    "width", "height", "depth", "margin", "border", "offset", "limit", "count",
    "level", "ratio", "delay", "retries", "timeout", "size", "color", "weight",
)  # fmt: skip
VERBS = (
    "draw", "merge", "split", "load", "store", "parse", "render", "sort",
    "filter", "group", "shift", "scale", "trim", "pad", "join", "fetch",
)  # fmt: skip


TRIES = 8  # per recall question: some draws of files have no four functions
DIFFS = (2, 4, 8)
SHARES = (0.125, 0.5, 0.95)  # of the context: lengths of needle and recall questions


@dataclass(frozen=True, slots=True)
class Question:
    text: str  # the answers continue it
    answers: tuple[str, ...]  # the first is right


def is_right(model: TextModel, question: Question) -> bool:
    """Tokenize the answers apart from the question."""
    before = model.ids(question.text)
    scores = []
    for answer in question.answers:
        logprobs = token_logprobs(model.decoder, [*before, *model.ids(answer)], 1.0)[len(before) :]
        scores.append(sum(logprobs) / len(answer.encode()))
    return scores[0] > max(scores[1:])


def every_kind(
    model: TextModel, repositories: Sequence[Sequence[tuple[str, str]]], seed: int, questions: int, context: int
) -> dict[str, tuple[int, int]]:
    """By kind, how many answers are right, and how many questions fit into the context."""
    made: dict[str, list[Question]] = {}
    for diffs in DIFFS:
        rng = random.Random(f"{seed} state {diffs}")
        made[f"state/{diffs}"] = [state_question(rng, diffs) for _ in range(questions)]
    rng = random.Random(f"{seed} api")
    made["api"] = [api_question(rng) for _ in range(questions)]
    lengths = [int(share * context) for share in SHARES]
    made |= long_questions(repositories, lengths, model.count, seed, needles=questions, questions=questions)
    found = {}
    for name, of_kind in made.items():
        fitting = [one for one in of_kind if model.count(one.text) + 8 <= context]
        found[name] = (sum(is_right(model, one) for one in fitting), len(fitting))
    return found


def long_questions(
    repositories: Sequence[Sequence[tuple[str, str]]],
    lengths: Sequence[int],
    count: Callable[[str], int],
    seed: int,
    needles: int,
    questions: int,
) -> dict[str, list[Question]]:
    """By kind and length, so many of each; of a length that no four functions fit into, none about a repository."""
    made: dict[str, list[Question]] = {}
    sources = [[source(path, text, count) for path, text in files] for files in repositories]
    for length in lengths:
        rng = random.Random(f"{seed} needle {length}")
        made[f"needle/{length}"] = [needle_question(rng, length, count) for _ in range(needles)]
    for length in lengths:
        rng = random.Random(f"{seed} recall {length}")
        found = (recall_question(rng, sources, length, count) for _ in range(TRIES * questions))
        made[f"recall/{length}"] = list(islice(filter(None, found), questions))
    made["recall/none"] = [without_context(one) for one in made[f"recall/{lengths[-1]}"]]
    return made


def state_question(rng: random.Random, diffs: int) -> Question:
    names, values = rng.sample(NAMES, 6), rng.sample(range(10, 100), 6 + diffs)
    now = dict(zip(names, values, strict=False))
    lines = ["# settings.py", *(f"{name} = {value}" for name, value in now.items())]
    asked = rng.choice(names)
    changed = [asked, *rng.choices(names, k=diffs - 1)]
    rng.shuffle(changed)
    seen = {asked: [now[asked]]}
    for name, value in zip(changed, values[6:], strict=True):
        lines += ["", "--- a/settings.py", "+++ b/settings.py", f"-{name} = {now[name]}", f"+{name} = {value}"]
        now[name] = value
        if name == asked:
            seen[asked].append(value)
    old = [value for value in seen[asked] if value != now[asked]]
    others = [now[name] for name in names if name != asked]
    wrong = [*old[-1:], *rng.sample(others, 3)][:3]
    return Question("\n".join([*lines, "", "# settings.py now", f"{asked} = "]), _texts(now[asked], wrong))


def api_question(rng: random.Random) -> Question:
    verbs = rng.sample(VERBS, 6)
    takes = dict(zip(verbs, map(", ".join, rng.sample(list(permutations(NAMES, 2)), 6)), strict=True))
    source = [f"def {verb}({names}):\n    return {names.replace(', ', ' + ')}\n" for verb, names in takes.items()]
    asked, *others = rng.sample(verbs, 4)
    text = "# api.py\n" + "\n\n".join(source) + f"\n\n# the signature of {asked}\ndef {asked}("
    return Question(text, (takes[asked], *(takes[verb] for verb in others)))


def needle_question(rng: random.Random, tokens: int, count: Callable[[str], int]) -> Question:
    """About so many tokens long."""
    name, (value, *wrong) = rng.choice(NAMES).upper(), rng.sample(range(1000, 10_000), 4)
    end, needle = f"\n\n# the value of {name}\n{name} = ", f"{name} = {value}\n"
    lines, used = list[str](), count(needle) + count(end) + 8
    while (used := used + count(line := _filler(rng))) <= tokens:
        lines.append(line)
    lines.insert(rng.randrange(len(lines) + 1), needle)
    return Question("".join(lines) + end, _texts(value, wrong))


def _filler(rng: random.Random) -> str:
    return f"def {rng.choice(VERBS)}_{rng.choice(NAMES)}(value):\n    return value + {rng.randrange(10, 100)}\n\n"


def _texts(right: int, wrong: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{value}\n" for value in (right, *wrong))


@dataclass(frozen=True, slots=True)
class Definition:
    """A function that a file defines, and what follows its name: parameters and the first line of the body."""

    path: str
    name: str
    rest: str


@dataclass(frozen=True, slots=True)
class Source:
    """A file as it is put into a context: how long it is, and what can be asked of it."""

    written: str
    tokens: int
    functions: list[Definition]
    question: int  # tokens of the longest one about it, the answer included


LONGEST = 200  # characters of an answer
MADE_UP = 8  # functions of a file that is made up


def source(path: str, text: str, count: Callable[[str], int]) -> Source:
    written, functions = f"# {path}\n{text.rstrip()}\n\n", definitions(path, text)
    longest = max((count(asked_for(one) + one.rest) for one in functions), default=0)
    return Source(written, count(written), functions, longest)


def definitions(path: str, text: str) -> list[Definition]:
    """Functions of a module, not those of classes. None of tests, whose names say what they hold, and none of what does
    not parse."""
    if is_test_file(path):
        return []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines, found = text.splitlines(keepends=True), []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            start, _, rest = "".join(lines[node.lineno - 1 : node.body[0].lineno]).partition(f"def {node.name}(")
            if not start and rest and len(rest) <= LONGEST:
                found.append(Definition(path, node.name, rest.rstrip("\n") + "\n"))
    return found


def asked_for(one: Definition) -> str:
    return f"# {one.name} of {one.path}\ndef {one.name}("


def recall_question(
    rng: random.Random, repositories: Sequence[Sequence[Source]], tokens: int, count: Callable[[str], int]
) -> Question | None:
    """About so many tokens long; None where no four functions fit into them. A file that defines a name once more is
    passed over, so that a name stands for one function."""
    taken, used, question = list[Source](), 8, 0
    names = set[str]()
    for file in (file for one in rng.sample(repositories, len(repositories)) for file in one):
        new = {one.name for one in file.functions}
        if used + file.tokens + max(question, file.question) <= tokens and not new & names:
            taken.append(file)
            used, question, names = used + file.tokens, max(question, file.question), names | new
    known = {one.rest: one for file in taken for one in file.functions}
    asked = rng.choice(list(known.values())) if known else None
    beside = {one.rest for file in taken for one in file.functions if asked and one.path == asked.path}
    others = [rest for rest in known if rest not in beside]  # two files may have the same one
    if asked is None or len(others) < 3:
        return None
    text = [file.written for file in taken]
    for number in range(tokens):  # where the files are too few
        made = source(f"more/part_{number}.py", "".join(_filler(rng) for _ in range(MADE_UP)), count)
        used += made.tokens
        if used + question > tokens:
            break
        text.insert(rng.randrange(len(text) + 1), made.written)
    return Question("".join(text) + asked_for(asked), (asked.rest, *rng.sample(others, 3)))


def without_context(question: Question) -> Question:
    """The same, with nothing to look it up in: who is right here has guessed, or known it before."""
    return Question("\n".join(question.text.rsplit("\n", 2)[-2:]), question.answers)
