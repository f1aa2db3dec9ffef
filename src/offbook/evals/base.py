"""What a model knows before it is an agent: `eval --suite base`. No message is sampled and no sandbox is opened.

    bits_per_byte   of held-out code: the files of held-out tasks with their solutions in place
    state           a file, then diffs of it: which value has a name now?
    api             a module's source, then a call of one of its functions: which arguments does it take?
    needle          a constant somewhere in a long file: which value has it? By the length of the file
    recall          files of repositories, then the name of a function of one of them: how does it go on? By the length
                    of them all, and without them

All but the first are questions with four answers, of which the likeliest by its bytes is the model's. Chance is a
quarter.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from offbook.core.config import Precision
from offbook.core.shares import wilson
from offbook.evals.questions import (
    Question,
    api_question,
    needle_question,
    recall_question,
    source,
    state_question,
    without_context,
)
from offbook.rl.models import chat_folder, load_model, positions
from offbook.stages.corpus import File, domain_of, in_order
from offbook.tasks.check import gold_changes
from offbook.train.forward import Decoder
from offbook.train.measure import answer_logprobs, token_logprobs
from offbook.types import OffbookError, Task

BASE = "base"
QUESTIONS = 24  # of a kind
NEEDLES = 8
MOST_FILES = 60  # that bits are counted on
TRIES = 8  # for a question about a repository: of some, no four functions fit
DIFFS = (2, 4, 8)
SHARES = (0.125, 0.5, 0.95)  # of what the model reads, in which a needle is looked for


class Asked:
    """A model that is asked."""

    def __init__(self, folder: Path, precision: Precision = "float32"):
        self.decoder = Decoder(load_model(folder, precision))  # first: it says so where there is no model
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(chat_folder(folder), trust_remote_code=False)
        except (OSError, ValueError):
            raise OffbookError(f"{folder} has no tokenizer that can be read; save it beside the model") from None
        self.positions = positions(chat_folder(folder))

    def ids(self, text: str) -> list[int]:
        """Control tokens in the text become ordinary characters."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return found

    def count(self, text: str) -> int:
        return len(self.ids(text))

    def is_right(self, question: Question) -> bool:
        """Each answer is read behind the question, in ids of its own. The question is read once."""
        found = answer_logprobs(self.decoder, self.ids(question.text), list(map(self.ids, question.answers)))
        scores = [sum(one) / len(answer.encode()) for one, answer in zip(found, question.answers, strict=True)]
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
    precision: Precision = "float32",
) -> dict[str, Any]:
    """`limit` questions of a kind, where it is not 0; `context` is the longest that is read, where it is not 0."""
    asked, questions = Asked(folder, precision), limit or QUESTIONS
    most = min(asked.positions, context or asked.positions)
    repositories = list(held_out_code(tasks))
    texts = [f"# {path}\n{text}" for files in repositories for path, text in files][: limit or MOST_FILES]
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
    lengths, needles = [int(share * most) for share in SHARES], min(NEEDLES, questions)
    made |= long_questions(repositories, lengths, asked.count, seed, needles, questions)
    for number, (name, of_kind) in enumerate(made.items()):
        progress(f"base: {name}", number / len(made))
        fitting = [one for one in of_kind if asked.count(one.text) + 8 <= most]
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


def held_out_code(tasks: Sequence[Task]) -> Iterator[list[tuple[str, str]]]:
    """Of each task's tree the Python files that no task before had, solutions in place, as a repository is read."""
    seen: set[str] = set()
    for task in tasks:
        try:
            gold = gold_changes(task)
        except OffbookError:  # a folder of others, without one
            gold = {}
        files = []
        for path in sorted(task.tree.rglob("*.py")):
            name = path.relative_to(task.tree).as_posix()
            text = gold.get(name) or path.read_text(errors="replace")
            if text.strip() and text not in seen:
                seen.add(text)
                files.append(File(name, text, domain_of(name)))
        if files:
            yield [(file.path, file.text) for file in in_order(files)]


def cells(result: dict[str, Any]) -> list[list[str]]:
    """For people: one line per measure."""
    code = result["code"]
    rows = [["measure", "value", "interval", "on"]]
    rows.append(
        ["bits per byte", f"{code['bits_per_byte']:.3f}", "", f"{code['bytes']} bytes of {code['files']} files"]
    )
    for name, one in result.items():
        if isinstance(one, dict) and "right" in one:
            value = f"{one['right'] / one['of']:.2f}" if one["of"] else "too long"
            rows.append([name, value, f"{one['low']:.2f} to {one['high']:.2f}", f"{one['of']} questions, chance 0.25"])
    return rows
