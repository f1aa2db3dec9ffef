"""The stages before RL on a real base and real code, on one GPU: each part a row.

    python bench/gpu/stages.py --model FOLDER --data SDISTS --out runs/gpu-stages --json stages.json
    python bench/gpu/stages.py --tiny --out runs/gpu-stages-tiny            # where there is no GPU: whether it runs

--data is a folder of source distributions; those of HELD_OUT are measured on and not learned from. The base is
pretrained further, then stretched by YaRN to 32k and, from the same checkpoint, to 256k, each measured before and after
a few steps of that length. Imitation starts from the 32k model, which transformers and vLLM read as well. What is done
already is not done again; a part that fails is its error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

from questions import every_kind, is_right, long_questions
from shapes import DEVICE, allocated_gib, free_memory
from transformers import AutoModelForCausalLM
from vllm_engine import complete, differences, engine

from offbook.core.config import Config, Precision, load_config
from offbook.core.runfolder import RunFolder, latest_checkpoint, write_atomic
from offbook.evals.base import TextModel, held_out_code
from offbook.pocket.model import Recipe, make_pocket
from offbook.pocket.tasks import make_pocket_tasks
from offbook.rl.models import load_model, model_folder, quiet
from offbook.stages.corpus import Corpus
from offbook.stages.pretrain import extended, pretrain
from offbook.stages.sft import sft
from offbook.tasks import load_tasks
from offbook.train.forward import token_logprobs

HELD_OUT = ("httpx", "tornado")
LONG = {"32k": ("black", "mpmath"), "256k": ("black",)}  # what is learned from at that length
PRECISION: Precision = "bfloat16" if DEVICE == "cuda" else "float32"
REAL = {"8k": 8192, "32k": 32_768, "256k": 262_144, "batch": 65_536, "questions": 8, "episodes": 600}
TINY = {"8k": 512, "32k": 4096, "256k": 8192, "batch": 2048, "questions": 2, "episodes": 16}
Row = dict[str, Any]


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options, self.out, self.sizes = options, Path(options.out), TINY if options.tiny else REAL

    def model(self, name: str) -> Path:
        """After a part, or with positions stretched and no step yet (`start of 32k`)."""
        if name == "base":
            tiny = self.options.tiny and make_pocket(self.out / "models", 0, quiet, Recipe(episodes=40))
            return tiny or model_folder(self.options.model, 0)
        if name.startswith("start of "):
            of = name.removeprefix("start of ")
            return extended(self.model("pretrain"), self.out / f"start-{of}", self.sizes[of], "yarn", print)
        return latest_checkpoint(RunFolder(self.out / name))

    def sources(self, names: tuple[str, ...] = (), held: bool = False) -> list[str]:
        if self.options.tiny:
            return ["pocket-code:4"] if held else ["pocket-code:12"]
        found = {path.name.rpartition("-")[0]: str(path) for path in sorted(self.options.data.glob("*.tar.gz"))}
        return [path for name, path in found.items() if (name in HELD_OUT) == held and name in (names or found)]

    def config(self, recipe: str, model: Path, out: str, keys: dict[str, Any]) -> Config:
        given = {"model": model, "out": self.out / out, "train.precision": PRECISION, "train.compile": "false", **keys}
        return load_config([recipe], {key: str(value) for key, value in given.items()})

    def pretraining(self, name: str, start: str) -> Config:
        is_long, context = name in LONG, self.sizes.get(name, self.sizes["8k"])
        keys = {"data": json.dumps(self.sources(LONG.get(name, ()))), "hold_out": json.dumps(HELD_OUT), "rope": "yarn"}
        keys |= {"context": context, "batch_tokens": max(context, self.sizes["batch"]), "validation_share": 0}
        keys = {f"pretrain.{key}": value for key, value in {**keys, "learning_rate": 1e-4 if is_long else 3e-4}.items()}
        return self.config("standard", self.model(start), name, keys)

    def trained(self, run: Callable[..., RunFolder], config: Config) -> Row:
        rows, _ = run(config, tell=lambda line: print(f"  {line}", flush=True)).metrics()
        seconds, tokens = [row["train_s"] for row in rows], sum(row["train_tokens"] for row in rows)
        found = {"steps": len(rows), "tokens": tokens, "train_s": sum(seconds), "longest_step_s": max(seconds)}
        found |= {"tokens_a_second": tokens / sum(seconds), "peak_gib": allocated_gib(peak=True)}
        return {**found, "first_loss": rows[0]["ce/loss"], "last_loss": rows[-1]["ce/loss"]}

    def learn(self, name: str) -> Row:
        return self.trained(pretrain, self.pretraining(name, "pretrain" if name in LONG else "base"))

    def sft(self) -> Row:
        keys = {"sft.data": json.dumps([f"pocket:{self.sizes['episodes']}"]), "sft.learning_rate": 2e-4}
        return self.trained(sft, self.config("pocket", self.model("32k"), "sft", keys))

    @cached_property
    def held_out(self) -> list[str]:
        """Each repository that is measured on as one text."""
        settings = self.pretraining("pretrain", "base").pretrain
        corpus = Corpus(settings.model_copy(update={"data": self.sources(held=True), "hold_out": []}))
        found = corpus.repositories(0, quiet)
        return ["".join(f"# {file.path}\n{file.text.rstrip()}\n\n" for file in one.files) for one in found]

    def bits(self, model: str) -> Row:
        return TextModel(self.model(model), PRECISION).bits_per_byte(self.held_out)

    def questions(self, model: str, context: str) -> Row:
        if not (tasks := self.out / "tasks").is_dir():
            asyncio.run(make_pocket_tasks(tasks, 0, 2, 12, lambda share: None))
        asked, code = TextModel(self.model(model), PRECISION), list(held_out_code(load_tasks(tasks / "heldout")))
        found = every_kind(asked, code, 0, self.sizes["questions"], min(asked.positions, self.sizes[context]))
        return {name: f"{right}/{of}" for name, (right, of) in found.items()}

    def far(self, model: str) -> Row:
        """Nats a token of one long held-out text by how far into it, and needles at some of these lengths."""
        asked, limits = TextModel(self.model(model), PRECISION), [self.sizes[of] for of in ("8k", *LONG)]
        ids = asked.ids(max(self.held_out, key=len))[: limits[-1]]
        logp, edges, row = token_logprobs(asked.decoder, ids, 1.0), [1, *limits[:2], limits[2] // 2, limits[2]], Row()
        for start, end in pairwise(edges):
            if part := logp[start:end]:
                row[f"nats to {end}"] = -sum(part) / len(part)
        made = long_questions([], edges[1:-1], asked.count, 0, self.sizes["questions"] // 2, 1)
        return row | {name: f"{sum(is_right(asked, one) for one in of)}/{len(of)}" for name, of in made.items() if of}

    @torch.no_grad()
    def transformers(self) -> Row:
        """What another reader of the checkpoint makes of it, past the context that the base had."""
        asked = TextModel(folder := self.model("32k"))
        ids = asked.ids(max(self.held_out, key=len))[: self.sizes["8k"] * 3 // 2]
        ours = torch.tensor(token_logprobs(asked.decoder, ids, 1.0))[1:]
        plain, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), torch.tensor([ids])
        logits = plain.to(DEVICE)(told.to(DEVICE)).logits[0, :-1]
        apart = ((logits.gather(1, told[0, 1:, None].to(DEVICE))[:, 0] - logits.logsumexp(1)).cpu() - ours).abs()
        return {"tokens": len(ids), "most_apart": float(apart.max()), "rope": str(plain.config.rope_parameters)}

    def vllm(self) -> Row:
        """A needle past the old context, and how far log-probabilities are from a float32 forward."""
        asked, length = TextModel(folder := self.model("32k")), self.sizes["32k"] * 5 // 8
        (question,) = long_questions([], [length], asked.count, 0, 1, 1)[f"needle/{length}"]
        ids = asked.ids(question.text)
        with engine(argparse.Namespace(model=str(folder), share=0.4, length=self.sizes["32k"] - 128)) as running:
            answers = asyncio.run(complete(running, [ids]))
        apart = differences(load_model(folder), [ids], answers)
        said = {"right": question.answers[0].strip(), "said": asked.tokenizer.decode(answers[0].ids)[:40]}
        return {"prompt": len(ids), "mean_apart": apart["mean"], "most_apart": apart["max"], **said}

    def parts(self) -> dict[str, Callable[[], Row]]:
        return {
            "bits, base": partial(self.bits, "base"),
            "questions, base": partial(self.questions, "base", "8k"),
            "pretrain": partial(self.learn, "pretrain"),
            "bits, pretrain": partial(self.bits, "pretrain"),
            "questions, pretrain": partial(self.questions, "pretrain", "8k"),
            "questions, start of 32k": partial(self.questions, "start of 32k", "32k"),
            "32k": partial(self.learn, "32k"),
            "questions, 32k": partial(self.questions, "32k", "32k"),
            "transformers": self.transformers,
            "far, pretrain": partial(self.far, "pretrain"),
            "far, start of 256k": partial(self.far, "start of 256k"),
            "256k": partial(self.learn, "256k"),
            "far, 256k": partial(self.far, "256k"),
            "sft": self.sft,
            "vllm": self.vllm,
        }

    def row(self, name: str) -> Row:
        path, began = self.out / "results" / f"{name}.json", time.monotonic()
        if not path.is_file():
            free_memory()
            try:
                found = self.parts()[name]()
            except Exception as error:  # the other rows are worth having
                traceback.print_exc()
                return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            write_atomic(path, json.dumps({"seconds": time.monotonic() - began, **found}, indent=1) + "\n")
        return dict(json.loads(path.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a folder, or a name")
    parser.add_argument("--data", type=Path, default=Path("sdists"))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-stages"))
    parser.add_argument("--parts", nargs="+", default=[], help="by name; without, all of them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    bench, found, lines = Bench(options), dict[str, Row](), ["", "| part | |", "|---|---|"]
    for name in options.parts or bench.parts():
        found[name] = bench.row(name)
        said = (f"{key} {one:.4g}" if isinstance(one, float) else f"{key} {one}" for key, one in found[name].items())
        lines.append(f"| {name} | {', '.join(said)} |")
        print(lines[-1], flush=True)
        write_atomic(options.json or bench.out / "stages.json", json.dumps(found, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
