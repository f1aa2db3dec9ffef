"""What bench/cpu/long.py is trained on: windows in which what stands far away has to be copied, and a first model.

A window has files of pocket repositories and constants and, in between, some of what was defined before, asked for once
more in the words of questions.py. A name is defined once in a window.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch
from questions import NAMES, Definition, asked_for, definitions
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from offbook.agent.chat import BLOCK_END
from offbook.core.runfolder import whole_folder
from offbook.pocket.model import CHAT_TEMPLATE
from offbook.pocket.repos import NAMES as USUAL
from offbook.pocket.tasks import draft_tasks

KINDS = {"file": 2, "settings": 3, "functions": 4, "constants": 2, "again": 4}  # how often, of pieces of a window
TESTS = 0.3  # of the files without a function to ask for, that are taken
WORDS = ["".join(parts) for parts in product(("ba", "de", "fi", "go", "ku", "la", "me"), repeat=3)]
GROWN, BACK, COPIED = 2.0, 0.5, 0.5  # embeddings, and how much of what heads find they write down
LAYERS, HEADS, VOCABULARY, FILLED = 2, 4, 2048, "#\n"
USUAL_NAME = re.compile(r"\b(" + "|".join(USUAL) + r")\b")
Files = list[tuple[str, str]]
Pieces = list[tuple[str, bool]]  # texts, and whether one answers what was asked before it
Count = Callable[[str], int]


def repositories(rng: random.Random, split: str) -> Iterator[Files]:
    """Of pocket tasks, complete, with names of a larger pool."""
    last = ""
    for draft in draft_tasks(seed=rng.randrange(10**9), count=10**9, split=split):
        if draft.gold.name != last:
            last, names = draft.gold.name, dict(zip(USUAL, rng.sample(WORDS, len(USUAL)), strict=True))
            files = [(path, text) for path, text in draft.gold.files.items() if path.endswith(".py")]
            yield [(path, USUAL_NAME.sub(lambda one, names=names: names[one[1]], text)) for path, text in files]


class Window:
    """One that is being written."""

    def __init__(self, rng: random.Random, files: Iterator[tuple[str, str]]):
        self.rng, self.files = rng, files
        self.names = set[str]()
        self.functions: list[Definition] = []  # that nobody has asked for
        self.constants: dict[str, str] = {}

    def next(self) -> Pieces:
        """May be nothing."""
        kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
        return getattr(self, f"_{kind}")()

    def _file(self) -> Pieces:
        path, text = next(self.files)
        found = definitions(path, text)
        if {one.name for one in found} & self.names or not (found or self.rng.random() < TESTS):
            return []
        self.names |= {one.name for one in found}
        self.functions += found
        return [(f"# {path}\n{text.rstrip()}\n\n", False)]

    def _settings(self) -> Pieces:
        names = [name for name in self.rng.sample([*map(str.upper, NAMES), *WORDS], 6) if name not in self.names]
        self.names |= set(names)
        lines = {name: str(self.rng.randrange(1000, 10_000)) for name in names}
        self.constants |= lines
        return [("".join(f"{name} = {value}\n" for name, value in lines.items()), False)]

    def _functions(self) -> Pieces:
        if not self.functions:
            return []
        one = self.functions.pop(self.rng.randrange(len(self.functions)))
        return [(asked_for(one), False), (one.rest, True)]

    def _constants(self) -> Pieces:
        if not self.constants:
            return []
        name = self.rng.choice(list(self.constants))
        return [(f"\n\n# the value of {name}\n{name} = ", False), (f"{self.constants.pop(name)}\n", True)]

    def _again(self) -> Pieces:
        names = self.rng.sample(list(self.constants), min(4, len(self.constants)))
        return [piece for name in names for piece in ((f"{name} = ", False), (f"{self.constants.pop(name)}\n", True))]


def windows(seed: str, split: str, tokens: int, count: Count) -> Iterator[Pieces]:
    """Of at most so many tokens."""
    rng = random.Random(seed)
    files = (file for files in repositories(rng, split) for file in files)
    while True:
        window, pieces, used = Window(rng, files), Pieces(), 0
        while True:
            new = window.next()
            used += sum(count(text) for text, _ in new)
            if used > tokens:
                break
            pieces += new
        yield pieces


def write_windows(folder: Path, made: Iterator[Pieces], number: int, context: int, count: Count) -> None:
    """As files of one repository, each about as long as a window, so that each is one. Documents get no fill in the
    middle."""
    (folder / "windows").mkdir(parents=True)
    for place in range(number):
        path, text = f"windows/w{place:05d}.md", "".join(text for text, _ in next(made)).rstrip() + "\n\n"
        room = context - count(f"# {path}\n") - count(text)
        (folder / path).write_text(text + FILLED * (room // count(FILLED) - 1))


def first_model(folder: Path, seed: int, context: int, width: int) -> None:
    """Numbers of four digits are two tokens, and a name is one."""
    texts = windows(f"{seed} tokenizer", "train", 2000, lambda text: len(text) // 2)
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"[A-Za-z]+|[0-9]{1,2}|_| ?[^\sA-Za-z_0-9]+ ?|\n[\n ]*|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BLOCK_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(("".join(text for text, _ in next(texts)) for _ in range(200)), trainer)
    torch.manual_seed(seed)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "head_dim": width // HEADS}
    shape |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    shape |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": context}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, tie_word_embeddings=True, initializer_range=0.05))
    look_back(model)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=BLOCK_END, chat_template=CHAT_TEMPLATE)
    with whole_folder(folder) as part:
        model.save_pretrained(part)
        wrapped.save_pretrained(part)


@torch.no_grad()
def look_back(model: PreTrainedModel) -> None:
    """Heads that copy, set by hand: without them this model has not found any within a million tokens.

    Those of the first layer look 1, 2, 3 and 4 tokens back, by the fast rotations. Those of the second compare what
    stands so far back with what stands one further back elsewhere, by the slow rotations, and write down what they find
    there. Training changes all of it.
    """
    first, second = (layer.self_attn for layer in model.model.layers)
    width, size = model.config.head_dim, model.config.hidden_size
    rates = model.model.rotary_emb.inv_freq[: width // 4]
    model.get_input_embeddings().weight.mul_(GROWN)[:, 0] = (
        0.3 * GROWN
    )  # of every token, so that a head can do the same for all
    seen, slow = torch.randn(width, size) / size**0.5, range(width // 2 - width // 6, width // 2)
    seen[:, 0] = 0
    written = torch.linalg.qr(torch.randn(size, size))[0]
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(0.1)
    for layer, sharp in ((first, 3.2), (second, 2.0)):  # at 1 no head could pick one of 512 tokens
        layer.q_norm.weight.fill_(sharp)
        layer.k_norm.weight.fill_(sharp)
    for head in range(HEADS):
        rows = slice(head * width, (head + 1) * width)
        query, key = first.q_proj.weight[rows].mul_(0.02), first.k_proj.weight[rows].mul_(0.02)
        query[: len(rates), 0] = 1
        key[: len(rates), 0] = torch.cos((head + 1) * rates)
        key[width // 2 : width // 2 + len(rates), 0] = torch.sin((head + 1) * rates)
        first.v_proj.weight[rows] = seen
        first.o_proj.weight[:, rows] = BACK * written[:, rows]
        query, key = second.q_proj.weight[rows].mul_(0.02), second.k_proj.weight[rows].mul_(0.02)
        for number, dimension in enumerate([*slow, *(width // 2 + one for one in slow)]):
            query[dimension] = seen[number] if head == 0 else written[:, (head - 1) * width + number]
            key[dimension] = written[:, head * width + number]
        copied = torch.linalg.qr(torch.randn(size, width))[0]
        second.v_proj.weight[rows], second.o_proj.weight[:, rows] = copied.T, COPIED * copied
