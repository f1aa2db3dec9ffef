"""What a base model knows: `eval --suite base` reports bits per byte of the code of held-out tasks, solutions in place.

No message is sampled and no sandbox is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from offbook.core.config import Precision
from offbook.rl.models import chat_folder, load_model, positions
from offbook.stages.corpus import File, domain_of, in_order
from offbook.tasks.check import gold_changes
from offbook.train.forward import Decoder, token_logprobs
from offbook.types import OffbookError, Task

MAX_FILES = 60


class TextModel:
    """A model with its tokenizer, for log-probabilities of plain text."""

    def __init__(self, folder: Path, precision: Precision = "float32"):
        self.decoder = Decoder(load_model(folder, precision))  # first: its error names a folder without a model
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(chat_folder(folder), trust_remote_code=False)
        except (OSError, ValueError):
            raise OffbookError(f"{folder} has no tokenizer that can be read; save it with the model") from None
        self.positions = positions(chat_folder(folder))

    def ids(self, text: str) -> list[int]:
        """Tokenize; control tokens in the text become ordinary characters."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return found

    def count(self, text: str) -> int:
        return len(self.ids(text))

    def bits_per_byte(self, texts: Sequence[str]) -> dict[str, float]:
        """Texts longer than the model's positions are read in pieces."""
        nats = 0.0
        size = 0
        tokens = 0
        for text in texts:
            ids = self.ids(text)
            for start in range(0, len(ids), self.positions):
                piece = ids[start : start + self.positions]
                if len(piece) > 1:
                    nats -= sum(token_logprobs(self.decoder, piece, 1.0))
                    size += len(self.tokenizer.decode(piece[1:]).encode())
                    tokens += len(piece) - 1
        bits = nats / math.log(2) / max(1, size)
        return {"bits_per_byte": bits, "bytes": size, "tokens": tokens, "files": len(texts)}


def run_base(
    folder: Path, tasks: Sequence[Task], limit: int, progress: Callable[[str, float], None], precision: Precision
) -> dict[str, Any]:
    """`limit` files at most; 0 is MAX_FILES."""
    model = TextModel(folder, precision)
    texts = [f"# {path}\n{text}" for files in held_out_code(tasks) for path, text in files][: limit or MAX_FILES]
    if not texts:
        raise OffbookError("the held-out tasks have no Python file to count bits on; give --tasks.source")
    progress("base: held-out code", 0.0)
    result = {"suite": "base", "model": str(folder), "code": model.bits_per_byte(texts)}
    progress("base", 1.0)
    return result


def held_out_code(tasks: Sequence[Task]) -> Iterator[list[tuple[str, str]]]:
    """Python files of each task's tree, solutions in place, in reading order; a file that several tasks share once."""
    seen: set[str] = set()
    for task in tasks:
        try:
            gold = gold_changes(task)
        except OffbookError:  # a task folder of others, without a solution
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
