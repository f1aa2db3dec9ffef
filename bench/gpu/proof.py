"""Targeted hints on a pretrained model, and everything that might explain them away: one experiment in one process.

    python bench/gpu/proof.py --prepare --seeds 0 1 2 --out runs/proof         # on any machine: tasks, no GPU needed
    python bench/gpu/proof.py --model smollm2-135m --seeds 0 1 2 --tiers 1 --steps 30 --budget-minutes 25 \
        --out runs/proof

All arms of a seed begin at one imitation of scripted episodes (OUT/starts/seed-N, a small adapter that can be carried
to another machine) and train on the same tasks in the same order. Tier 1 is done for every seed, tiers 2 and 3 for the
first. A cell is an arm's training or its evaluation; its figures are in OUT/results/ARM-STEPS-seed-N.json when it is
over, and what is there is not done again. When the budget is spent the process ends; the same command goes on. An arm
that fails is named and left for the next time.

--model takes a name, a folder, or a folder with the parts of a GGUF file (gguf-00, gguf-01).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from ablation import HINTS
from proof_measures import functions_missing, perplexity, readings, rule_counts, taught, unrelated_text
from proof_report import report

from offbook.core.config import Config, load_config
from offbook.core.runfolder import RunFolder, is_adapter, latest_checkpoint, whole_folder, write_atomic
from offbook.evals.metrics import row_of
from offbook.pocket.demonstrations import LEARNED
from offbook.pocket.tasks import level_named, make_pocket_tasks
from offbook.rl.collector import Collector
from offbook.rl.evaluate import collect_into
from offbook.rl.models import load_model, model_folder
from offbook.rl.resume import RolloutFiles
from offbook.rl.tasks import task_sets
from offbook.rl.train import train
from offbook.stages.sft import sft
from offbook.types import OffbookError

TAUGHT = (*LEARNED, "edit_not_applied")  # rules whose hints may teach
HELD_OUT = "whole_suite_again"  # a rule that imitation never saw a reminder of; its hints teach, too
GRID = (("forward", "0.3"), ("forward", "3"), ("reverse", "0.3"), ("reverse", "1"), ("reverse", "3"))
BOUNDED = {"balance": "bounded", "bound": "0.3"}
Settings = dict[str, str]


@dataclass(frozen=True, slots=True)
class Arm:
    tier: int
    label: str
    settings: Settings


def hinted(**switches: str) -> Settings:
    return {f"feedback.{key}": value for key, value in switches.items()}


def own_reward(name: str, weight: float) -> Settings:
    file = str(Path(__file__).with_name("proof_rewards.py"))
    return {"rewards.files": json.dumps([file]), f"rewards.weights.{name}": str(weight)}


ARMS = {
    "rl": Arm(1, "RL", hinted(**HINTS["rl"])),
    "hints": Arm(1, "RL + hints", hinted(**HINTS["hints"])),
    "tokens": Arm(1, "RL + hints, moved tokens", hinted(**HINTS["tokens"])),
    "donor": Arm(1, "RL + hint of another rule", hinted(**HINTS["donor"])),
    "constant_negative": Arm(1, "RL + advantage -1 on the same message", hinted(**HINTS["constant_negative"])),
    "hints_alone": Arm(2, "hints alone", own_reward("without_outcome", 1.0)),
    "penalty": Arm(2, "RL, invalid calls in the reward", {**hinted(weight="0"), **own_reward("invalid_share", 0.5)}),
    "random_target": Arm(2, "RL + the hint on another message", hinted(**HINTS["random_target"])),
    "none": Arm(2, "RL + no hint, same targets", hinted(**HINTS["none"])),
    "every_turn": Arm(2, "RL + hints on all messages", hinted(**HINTS["every_turn"])),
    "sdpo": Arm(2, "RL + SDPO, the whole response", hinted(method="sdpo", gate="0")),
    **{
        f"{way}_{weight}": Arm(3, f"RL + hints, {way}, weight {weight}", hinted(direction=way, weight=weight))
        for way, weight in GRID
    },
    "bounded": Arm(3, "RL + bounded hints", hinted(**BOUNDED)),
    "donor_bounded": Arm(3, "RL + bounded hint of another rule", hinted(**HINTS["donor"], **BOUNDED)),
    "effort": Arm(3, "RL, effort in the reward", {**hinted(weight="0"), "rewards.effort.bound": "0.2"}),
    "tokens_bounded": Arm(3, "RL + bounded hints, moved tokens", hinted(**HINTS["tokens"], **BOUNDED)),
    "finishing": Arm(3, "RL, paid for handing in", {**hinted(weight="0"), "rewards.weights.unfinished": "0.5"}),
}  # fmt: skip
FURTHER = ("rl", "hints", "tokens_bounded", "constant_negative", "finishing")
SAME_RUN = {f"{name}_longer": name for name in FURTHER}  # trained further
ARMS |= {longer: replace(ARMS[name], tier=3) for longer, name in SAME_RUN.items()}
BEFORE = Arm(1, "before", {})


def arm_named(name: str) -> Arm:
    return BEFORE if name == "before" else ARMS[name]


def steps_of(name: str, options: argparse.Namespace) -> int:
    """Of an arm's training."""
    return 0 if name == "before" else options.steps * (options.longer if name in SAME_RUN else 1)


def _convert(weights: Path, folder: Path) -> None:
    """4 bits to float32."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source), dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(weights), return_tensors=True, model_to_load=model)["tensors"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied
    model.load_state_dict(tensors)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


class OutOfTime(Exception):
    """The budget is spent."""


@dataclass
class Experiment:
    options: argparse.Namespace
    began: float = field(default_factory=time.monotonic)

    @property
    def out(self) -> Path:
        return Path(self.options.out).resolve()

    def left_s(self) -> float:
        return 60 * self.options.budget_minutes - (time.monotonic() - self.began)

    def settings(self, seed: int, arm: Arm, name: str) -> Settings:
        """Of an arm's run; what --set says wins over all but the arm's own switches."""
        options = self.options
        common = {
            "harness.profile": "pocket", "harness.turns": str(options.turns), "harness.tokens": str(options.context),
            "harness.context": str(options.context), "harness.message_tokens": "160", "harness.summarize_at": "0",
            "harness.command_s": "20", "harness.wall_s": "600",
            "engine.kind": options.engine,
            "train.groups": "4", "train.group_size": "8", "train.learning_rate": "1e-4",
            "train.lora.rank": str(options.lora_rank),
            "feedback.balance": "rl", "feedback.token_gate": "0", "feedback.rules": json.dumps([*TAUGHT, HELD_OUT]),
            "feedback.max_targets": "6",  # a rollout of 25 turns has about 8 faults
            "checkpoint.every": "2", "checkpoint.keep": "1",
            "eval.samples": str(options.samples),
        }  # fmt: skip
        if (
            torch.cuda.is_available()
        ):  # what is free of the GPU differs from arm to arm; how a step is computed must not
            common |= {"train.precision": "bfloat16", "train.recompute": "none", "train.micro_tokens": "8192"}
            common |= {"train.compile": "false"}  # it takes a minute, and there are few steps
        return {
            **common,
            **dict(option.split("=", 1) for option in options.set),
            **self.same_rules(seed, name),
            **arm.settings,
            "seed": str(seed),
            "model": str(self.start_folder(seed)),
            "tasks.source": str(self.tasks_folder(seed)),
            "train.steps": str(max(1, steps_of(name, options))),
            "out": str(self.out / "runs" / SAME_RUN.get(name, name) / f"seed-{seed}"),
        }

    def same_rules(self, seed: int, name: str) -> Settings:
        """Controls have their targets from the rules that the look of the seed's `hints` arm found worth teaching."""
        looks = self.out / "runs" / "hints" / f"seed-{seed}" / "look.jsonl"
        if SAME_RUN.get(name, name) in ("before", "rl", "hints") or not looks.is_file():
            return {}
        rows = [json.loads(line) for line in looks.read_text().splitlines()]
        kept = [row["rule"] for row in rows if row["step"] == 1 and not row["why_not"]]
        return {"feedback.rules": json.dumps(kept), "feedback.look": "false"} if kept else {}

    def config(self, seed: int, name: str) -> Config:
        return load_config(["standard"], self.settings(seed, arm_named(name), name))

    def tasks_folder(self, seed: int) -> Path:
        return self.out / "tasks" / f"{self.options.tasks}-seed-{seed}"

    def start_folder(self, seed: int) -> Path:
        return self.out / "starts" / f"seed-{seed}"

    def result_file(self, name: str, seed: int) -> Path:
        steps = steps_of(name, self.options)
        return self.out / "results" / f"{SAME_RUN.get(name, name)}-{steps}-seed-{seed}.json"

    # What arms begin with

    def prepare(self, seed: int) -> None:
        """Tasks, made and verified."""
        folder, level = self.tasks_folder(seed), level_named(self.options.tasks)
        if folder.is_dir():
            return
        if level is None:
            raise OffbookError(f"--tasks {self.options.tasks}: give `pocket`, `pocket-long` or `pocket-long-3-8`")
        numbers = self.options.train_tasks, self.options.eval_tasks
        asyncio.run(make_pocket_tasks(folder, seed, *numbers, lambda share: None, level))
        say(f"{folder}: {numbers[0]} tasks to train on, {numbers[1]} held out")

    def base(self) -> Path:
        """The pretrained model's folder."""
        model = Path(self.options.model)
        parts = sorted(model.glob("gguf-*"))
        if not parts:
            return model_folder(self.options.model, 0)
        folder = self.out / "model"
        if not folder.is_dir():
            with whole_folder(folder) as part:
                weights = self.out / "weights.gguf"
                weights.write_bytes(b"".join(piece.read_bytes() for piece in parts))
                _convert(weights, part)
                weights.unlink()
        return folder

    def start(self, seed: int) -> None:
        """The imitation of a seed. An adapter that was carried here is told where its base is."""
        folder, base = self.start_folder(seed), self.base()
        if not folder.is_dir():
            started = time.monotonic()
            imitate(self, seed, base, folder)
            size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
            say(f"start of seed {seed}: imitated in {time.monotonic() - started:.0f} s, {size:.1f} MiB")
        if is_adapter(folder):
            told = folder / "adapter_config.json"
            write_atomic(told, json.dumps({**json.loads(told.read_text()), "base_model_name_or_path": str(base)}))

    # Cells

    def is_measured(self, name: str, seed: int) -> bool:
        path = self.result_file(name, seed)
        return path.is_file() and "eval" in json.loads(path.read_text())

    def run(self, name: str, seed: int) -> None:
        """An arm, trained and measured; what is there of it is not done again."""
        if self.is_measured(name, seed):
            return
        path = self.result_file(name, seed)
        result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        config, started = self.config(seed, name), time.monotonic()
        folder, last, arm = RunFolder(config.out), steps_of(name, self.options), arm_named(name)
        result |= {"arm": SAME_RUN.get(name, name), "label": arm.label, "tier": arm.tier, "seed": seed, "steps": last}
        result |= {"order": ["before", *ARMS].index(name), "groups": config.train.groups}
        if name != "before":
            train(config, on_step=lambda row: self.check(name, seed, row))
            result |= {"curve": folder.metrics()[0][:last], "taught": taught(folder, last)}
            result["train_s"] = result.get("train_s", 0.0) + time.monotonic() - started
            self.keep(path, result)
            self.check(name, seed)
        result |= self.measured(config, latest_checkpoint(folder) if last else self.start_folder(seed), last)
        self.keep(path, result)
        say(f"{name}, seed {seed}: {shown(result)}")

    def keep(self, path: Path, result: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(result) + "\n")

    def check(self, name: str, seed: int, row: dict[str, Any] | None = None) -> None:
        if row is not None:
            numbers = ", ".join(f"{key} {row[key]:.3g}" for key in STEP_SHOWN if key in row)
            say(f"  {name}, seed {seed}, step {row['step']}: {numbers}")
        if self.left_s() <= 0:
            raise OutOfTime(f"{name}, seed {seed}")

    def measured(self, config: Config, checkpoint: Path, version: int) -> dict[str, Any]:
        """Held-out rollouts, the reading of faults with and without their hints, and text of another kind."""
        started = time.monotonic()
        model = load_model(checkpoint, config.train.precision)
        tasks = task_sets(config).heldout[: self.options.eval_tasks]
        collector = Collector(config, checkpoint)
        files = RolloutFiles.in_run(Path(config.out), f"steps-{version}")
        files.results.parent.mkdir(parents=True, exist_ok=True)
        with files.writing("evaluation", collector, tasks):
            groups, _ = collect_into(
                files, collector, tasks, config.eval.samples, "eval", parallel=self.options.parallel
            )
        rollouts = [rollout for group in groups for rollout in group]
        by_id = {task.id: task for task in tasks}
        return {
            "eval": [asdict(row_of(rollout, by_id[rollout.task])) for rollout in rollouts],
            "functions": {task.id: functions_missing(task) for task in tasks},
            "rules": rule_counts(rollouts, by_id),
            "messages": sum(rollout.usage.turns for rollout in rollouts),
            "eval_s": time.monotonic() - started,
            "readings": readings(model, config, self.options.tasks),
            "perplexity": perplexity(model, config),
            "text": unrelated_text()[1],
        }


STEP_SHOWN = (
    *("solved", "invalid_per_100", "turns", "hinted_targets"),
    *("rollout_s", "slowest/model_s", "slowest/tools_s", "slowest/scoring_s", "train_s"),
)


IMITATION_SHOWN = ("ce/loss", "validation/loss")


def say(line: str) -> None:
    print(line, flush=True)


def shown(result: dict[str, Any]) -> str:
    rows = [row["numbers"] for row in result["eval"]]
    calls = sum(row["calls"] for row in rows) or 1
    solved, invalid = sum(row["solved"] for row in rows) / len(rows), sum(row["invalid_calls"] for row in rows)
    return (
        f"solved {solved:.1%}, {100 * invalid / calls:.1f} invalid calls per 100, perplexity {result['perplexity']:.2f}"
    )


def imitate(experiment: Experiment, seed: int, base: Path, out: Path) -> None:
    """Scripted episodes with their faults, a share of the right messages behind a reminder, into the folder `out`."""
    options = experiment.options
    settings = experiment.settings(seed, BEFORE, "before") | {"model": str(base), "out": f"{out}.run"}
    settings |= {
        "sft.data": json.dumps([f"{options.tasks}:{options.episodes}"]),
        # So long that a reminder is heeded for what it says: docs/results/real-model.md.
        "sft.reminders": "0.5", "sft.epochs": "3", "sft.batch_tokens": "8192",
        "feedback.rules": json.dumps(TAUGHT),
        "sft.learning_rate": str(options.sft_learning_rate),
        "checkpoint.every": "400",
        **dict(option.split("=", 1) for option in options.set if option.startswith("sft.")),
    }  # fmt: skip

    def told(row: dict[str, Any]) -> None:
        if row["step"] % 25 == 1 or "validation/loss" in row:
            numbers = ", ".join(f"{key} {row[key]:.3f}" for key in IMITATION_SHOWN if key in row)
            say(f"  imitation, step {row['step']} of {row['steps']}: {numbers}")

    checkpoint = latest_checkpoint(sft(load_config(["standard"], settings), on_step=told))
    names = [path for path in checkpoint.iterdir() if path.is_file() and path.name not in ("state.json", "DONE")]
    with whole_folder(out) as part:  # an adapter's tokenizer is its base's
        for path in (path for path in names if path.name.startswith("adapter_") or not is_adapter(checkpoint)):
            (part / path.name).write_bytes(path.read_bytes())


def cells(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """As --arms has them, or in the order in which they are worth most: tier 1 seed by seed, then the others."""

    def seeds(name: str) -> list[int]:
        return options.seeds if arm_named(name).tier == 1 or options.every_seed else options.seeds[:1]

    if options.arms:
        yield from ((name, seed) for name in options.arms for seed in seeds(name))
        return
    for tier in sorted({*options.tiers}):
        names = [name for name in ("before", *ARMS) if arm_named(name).tier == tier]
        yield from ((name, seed) for seed in options.seeds for name in names if seed in seeds(name))


def run_all(experiment: Experiment) -> list[str]:
    """Returns what failed."""
    failed = []
    for name, seed in cells(experiment.options):
        try:
            if experiment.left_s() <= 0:
                raise OutOfTime(f"{name}, seed {seed}")
            experiment.prepare(seed)
            experiment.start(seed)
            experiment.run(name, seed)
        except OutOfTime as where:
            say(f"the budget is spent at {where}; the same command goes on")
            break
        except Exception as error:  # the other arms are worth their minutes all the same
            failed.append(
                f"{name}, seed {seed}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
            say(f"FAILED {failed[-1]}")
            if not isinstance(error, OffbookError):
                traceback.print_exc()
    return failed


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tiers", type=int, nargs="+", default=[1], choices=(1, 2, 3))
    parser.add_argument("--every-seed", action="store_true", help="tiers 2 and 3 for all seeds, too")
    parser.add_argument("--arms", nargs="+", choices=["before", *ARMS], help="only these, of any tier, in this order")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--longer", type=int, default=4, help="times as many steps for the arms named ..._longer")
    parser.add_argument("--engine", choices=("continuous", "vllm"), default="continuous")
    parser.add_argument(
        "--tasks", default="pocket-long", help="pocket, pocket-long, pocket-long-3-8: functions to restore"
    )
    parser.add_argument("--train-tasks", type=int, default=160)
    parser.add_argument("--eval-tasks", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="rollouts of each held-out task")
    parser.add_argument("--parallel", type=int, default=256, help="rollouts of an evaluation at once")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=45)
    parser.add_argument("--lora-rank", type=int, default=12, help="12 is 14 MiB of SmolLM2-135M; 0 trains all weights")
    parser.add_argument("--episodes", type=int, default=3000, help="to imitate")
    parser.add_argument("--sft-learning-rate", type=float, default=1e-3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of every run")
    parser.add_argument("--budget-minutes", type=float, default=1e9)
    parser.add_argument("--prepare", action="store_true", help="make the tasks of all seeds and end")
    parser.add_argument("--starts", action="store_true", help="make the starts of all seeds and end")
    parser.add_argument("--out", default="runs/proof")
    parser.add_argument("--json", type=Path, help="all figures in one file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    return parser


def main() -> None:
    options = parser().parse_args()
    logging.basicConfig(level=logging.WARNING)
    experiment = Experiment(options)
    if options.prepare or options.starts:
        for seed in options.seeds:
            (experiment.prepare if options.prepare else experiment.start)(seed)
        return
    failed = run_all(experiment)
    report(experiment.out / "results", options.json, options.markdown)
    sys.exit("; ".join(failed) or 0)


if __name__ == "__main__":
    main()
