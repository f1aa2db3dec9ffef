"""What a model knows before it is an agent: `eval --suite base`. No message is sampled and no box is opened.

    bits_per_byte   of held-out code: the files of held-out tasks with their solutions in place
    state           a file, then diffs of it: which value has a name now?
    api             a module's source, then a call of one of its functions: which arguments does it take?
    needle          a constant somewhere in a long file: which value has it? By the length of the file

The last three are questions with four answers, of which the likeliest by its bytes is the model's. Chance is a quarter.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from offbook.loop.models import chat_folder, load_model, positions
from offbook.shares import wilson
from offbook.tasks.check import gold_changes
from offbook.train.forward import Decoder
from offbook.train.measure import token_logprobs
from offbook.types import OffbookError, Task

BASE = "base"
QUESTIONS = 24  # of a kind
NEEDLES = 8  # of a length
MOST_FILES = 60  # that bits are counted on
DIFFS = (2, 4, 8)
SHARES = (0.125, 0.5, 0.95)  # of what the model reads, in which a needle is looked for
NAMES = (
    "width", "height", "depth", "margin", "border", "offset", "limit", "count",
    "level", "ratio", "delay", "retries", "timeout", "size", "color", "weight",
)  # fmt: skip
VERBS = (
    "draw", "merge", "split", "load", "store", "parse", "render", "sort",
    "filter", "group", "shift", "scale", "trim", "pad", "join", "fetch",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    text: str  # that the answers continue
    answers: tuple[str, ...]  # the first is right


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
    end = f"\n\n# the value of {name}\n{name} = "
    lines = [_filler(rng) for _ in range(max(1, (tokens - count(end)) // max(1, count(_filler(rng)))))]
    while lines and count("".join(lines) + end) > tokens - 8:
        lines.pop()
    lines.insert(rng.randrange(len(lines) + 1), f"{name} = {value}\n")
    return Question("".join(lines) + end, _texts(value, wrong))


def _filler(rng: random.Random) -> str:
    return f"def {rng.choice(VERBS)}_{rng.choice(NAMES)}(value):\n    return value + {rng.randrange(10, 100)}\n\n"


def _texts(right: int, wrong: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{value}\n" for value in (right, *wrong))


class Asked:
    """A model that is asked."""

    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(chat_folder(folder))
        self.decoder = Decoder(load_model(folder))
        self.positions = positions(chat_folder(folder))

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def is_right(self, question: Question) -> bool:
        """Each answer is read behind the question, in ids of its own."""
        before = self.ids(question.text)
        scores = []
        for answer in question.answers:
            ids = self.ids(answer)
            logprobs = token_logprobs(self.decoder, [*before, *ids], 1.0)
            scores.append(sum(logprobs[len(before) :]) / len(answer.encode()))
        return scores[0] > max(scores[1:])

    def bits_per_byte(self, texts: Sequence[str]) -> dict[str, float]:
        """What does not fit the model's positions is read in pieces."""
        nats, size, tokens = 0.0, 0, 0
        for text in texts:
            ids = self.ids(text)
            for start in range(0, len(ids), self.positions):
                piece = ids[start : start + self.positions]
                if len(piece) > 1:
                    nats -= sum(token_logprobs(self.decoder, piece, 1.0))
                    size += len(self.tokenizer.decode(piece[1:]).encode())
                    tokens += len(piece) - 1
        return {
            "bits_per_byte": nats / math.log(2) / max(1, size),
            "bytes": size,
            "tokens": tokens,
            "files": len(texts),
        }


def run_base(
    folder: Path,
    tasks: Sequence[Task],
    seed: int = 0,
    limit: int = 0,
    context: int = 0,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> dict[str, Any]:
    """`limit` questions of a kind, where it is not 0; `context` is the longest that is read, where it is not 0."""
    asked, questions = Asked(folder), limit or QUESTIONS
    most = min(asked.positions, context or asked.positions)
    texts = list(held_out_code(tasks))[: limit or MOST_FILES]
    if not texts:
        raise OffbookError("the held-out tasks have no Python file to count bits on; give --tasks.source")
    progress("base: held-out code", 0.0)
    result: dict[str, Any] = {"suite": BASE, "model": str(folder), "seed": seed, "code": asked.bits_per_byte(texts)}
    made: dict[str, list[Question]] = {}
    for diffs in DIFFS:
        rng = random.Random(f"{seed} state {diffs}")
        made[f"state/{diffs}"] = [state_question(rng, diffs) for _ in range(questions)]
    rng = random.Random(f"{seed} api")
    made["api"] = [api_question(rng) for _ in range(questions)]
    for share in SHARES:
        length, rng = int(share * most), random.Random(f"{seed} needle {share}")
        few = min(NEEDLES, questions)
        made[f"needle/{length}"] = [needle_question(rng, length, lambda text: len(asked.ids(text))) for _ in range(few)]
    for number, (name, of_kind) in enumerate(made.items()):
        progress(f"base: {name}", number / len(made))
        fitting = [one for one in of_kind if len(asked.ids(one.text)) + 8 <= most]
        right = sum(asked.is_right(one) for one in fitting)
        low, high = wilson(right, len(fitting)) if fitting else (0.0, 1.0)
        result[name] = {
            "right": right,
            "of": len(fitting),
            "low": low,
            "high": high,
            "too_long": len(of_kind) - len(fitting),
        }
    progress("base", 1.0)
    return result


def held_out_code(tasks: Sequence[Task]) -> Iterator[str]:
    """Python files of the tasks' trees with the solutions in place, each text once, behind its path."""
    seen: set[str] = set()
    for task in tasks:
        try:
            gold = gold_changes(task)
        except OffbookError:  # a folder of others, without one
            gold = {}
        for path in sorted(task.tree.rglob("*.py")):
            name = path.relative_to(task.tree).as_posix()
            text = gold.get(name) or path.read_text(errors="replace")
            if text.strip() and text not in seen:
                seen.add(text)
                yield f"# {name}\n{text}"


def cells(result: dict[str, Any]) -> list[list[str]]:
    """For people: a line a measure."""
    code = result["code"]
    rows = [["measure", "value", "interval", "on"]]
    rows.append(["bits a byte", f"{code['bits_per_byte']:.3f}", "", f"{code['bytes']} bytes of {code['files']} files"])
    for name, one in result.items():
        if isinstance(one, dict) and "right" in one:
            value = f"{one['right'] / one['of']:.2f}" if one["of"] else "too long"
            rows.append([name, value, f"{one['low']:.2f} to {one['high']:.2f}", f"{one['of']} questions, chance 0.25"])
    return rows
