"""How well a model judges: each use of one, asked about stored rollouts that were labelled by hand.

    python bench/gpu/judges.py MODEL_OR_URL [RUNS ...] --out judges.json [--labels LABELS.jsonl] [--name NAME]
        [--uses judge monitor reward] [--limit 40] [--minutes 15] [--parallel 8] [--reply-tokens 256]
    python bench/gpu/judges.py RUNS ... --template --labels LABELS.jsonl

MODEL is a transformers folder, served by `offbook serve` on this machine's loopback; a URL is any server with OpenAI's
chat completions (`--name` is the model's name there). RUNS are run or evaluation folders, or files that `offbook coach`
reads; without any the 40 scripted rollouts of judges_data/ are asked about. A label is a line with `rollout`, `faulty`
(the messages that a judge may name; empty: none), `maybe` (not counted), `hack`, `reward` (0 or 1: is the change what
was asked for, and right). `--template` writes such a file to fill in.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from offbook.core.client import KEY, Client, NoAnswer
from offbook.signals.feedback import MISTAKES
from offbook.signals.feedback.coach import stored_in
from offbook.signals.judge import PREFIX, Assessor, Judge
from offbook.signals.judge.judge import NO_JSON
from offbook.signals.monitors.policy import CHEATING
from offbook.signals.rewards.compose import PROMPTS
from offbook.types import Rollout

DATA = Path(__file__).with_name("judges_data")
EXCERPT = 160
Row = dict[str, Any]


class Metered(Client):
    """Counts what is asked."""

    def __init__(self, *given: Any, limit: int, **more: Any):
        super().__init__(*given, **more)
        self.limit, self.posts = limit, list[Row]()

    async def post(self, body: dict[str, Any], http: Any) -> Any:
        began = time.monotonic()
        body = {**body, "max_tokens": min(self.limit, body["max_tokens"])}
        row: Row = {"constrained": "response_format" in body}
        try:
            reply = await super().post(body, http)
            usage = reply.usage
            row |= {"reply": reply.choices[0].message.content, "prompt_tokens": usage.prompt_tokens if usage else 0}
            row["reply_tokens"] = usage.completion_tokens if usage else 0
            return reply
        except NoAnswer as error:
            row["error"] = str(error)
            raise
        finally:
            row["again"] = any(said["content"].startswith("That cannot be used") for said in body["messages"][1:])
            self.posts.append({**row, "seconds": time.monotonic() - began})


@contextmanager
def served(model: str, reply_tokens: int) -> Iterator[str]:
    """The URL of `offbook serve` with this model, greedy: it takes no temperature from requests."""
    with tempfile.TemporaryDirectory(prefix="judges-") as folder:
        command = [sys.executable, "-m", "offbook", "serve", "--model", model, "--port", "0", "--json"]
        command += ["--out", f"{folder}/serve", "--engine.temperature", "1e-6"]
        command += ["--harness.message_tokens", str(reply_tokens), "--idle-s", "36000"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                sys.exit(f"offbook serve ended with {process.wait()}")
            variables = json.loads(line)["env"]
            os.environ[KEY] = variables["OPENAI_API_KEY"]
            yield variables["OPENAI_BASE_URL"]
        finally:
            process.terminate()
            process.wait(60)


async def each(items: list[Any], ask: Callable[[Any], Awaitable[Row]], options: argparse.Namespace) -> list[Row]:
    """The rows of those that were begun within the time."""
    deadline, slots = time.monotonic() + 60 * options.minutes, asyncio.Semaphore(options.parallel)

    async def one(item: Any) -> Row | None:
        async with slots:
            return await ask(item) if time.monotonic() < deadline else None

    return [row for row in await asyncio.gather(*map(one, items)) if row]


def shares(rows: list[Row], said: str, truth: str) -> Row:
    hits = Counter((bool(row[said]), bool(row[truth])) for row in rows)
    found, true = hits[True, True] + hits[True, False], hits[True, True] + hits[False, True]
    return {
        "precision": hits[True, True] / found if found else None,
        "recall": hits[True, True] / true if true else None,
        "found": found,
        "true": true,
        "base_rate": true / len(rows) if rows else None,
    }


async def judge(client: Metered, rollouts: list[tuple[Rollout, Row]], options: argparse.Namespace) -> Row:
    """The judge of hints: which message is faulty. A finding is right where its message is one of the label's."""
    without = [f"{PREFIX}{name}" for name in MISTAKES.prompts if options.rubrics and name not in options.rubrics]

    async def ask(item: tuple[Rollout, Row]) -> Row:
        rollout, label = item
        read = await Judge(client, MISTAKES, without=without).read([(rollout, None)])
        bad = read.refused[NO_JSON] + read.refused["not in the form asked for"]
        found = [(one.message, one.rule, one.note) for one in read.found]
        dropped = [(one.message, one.rule) for one in read.unconfirmed]
        return {
            "rollout": rollout.id, "label": label, "found": found, "dropped": dropped, "asked": read.asked,
            "usable": max(0, read.answered - bad), "refused": read.refused, "unanswered": read.unanswered,
        }  # fmt: skip

    rows = await each(rollouts, ask, options)

    def scored(place: Callable[[Row], list[Any]]) -> Row:
        said = [(one[0], row["label"]) for row in rows for one in place(row) if one[0] not in row["label"]["maybe"]]
        right = sum(message in label["faulty"] for message, label in said)
        faulty = [row for row in rows if row["label"]["faulty"]]
        hit = sum(any(one[0] in row["label"]["faulty"] for one in place(row)) for row in faulty)
        messages = [
            (number in row["label"]["faulty"])
            for row in rows
            for number in range(1, 1 + max(row["label"]["faulty"], default=5), 2)
        ]
        return {
            "precision": right / len(said) if said else None,
            "recall": hit / len(faulty) if faulty else None,
            "found": len(said),
            "true": len(faulty),
            "base_rate": mean(messages) if messages else None,  # a message picked at random
        }

    return {
        **scored(lambda row: row["found"]),
        "unconfirmed": scored(lambda row: [*row["found"], *row["dropped"]]),
        "asked": sum(row["asked"] for row in rows),
        "usable": sum(row["usable"] for row in rows) / max(1, sum(row["asked"] for row in rows)),
        "refused": dict(sum((row["refused"] for row in rows), Counter[str]())),
        "rows": rows,
    }


async def monitor(client: Metered, rollouts: list[tuple[Rollout, Row]], options: argparse.Namespace) -> Row:
    """The model as monitor: is there a finding in a rollout that cheats, and none in one that does not?"""
    auditor = Judge(client, CHEATING)

    async def ask(item: tuple[Rollout, Row]) -> Row:
        rollout, label = item
        read = await auditor.read([(rollout, None)])
        dropped = [(one.rule, one.message) for one in read.unconfirmed]
        return {
            "rollout": rollout.id, "hack": label["hack"], "found": [(one.rule, one.message) for one in read.found],
            "dropped": dropped, "any": bool(read.found or dropped), "refused": read.refused,
            "unanswered": read.unanswered,
        }  # fmt: skip

    rows = await each(rollouts, ask, options)
    return {
        **shares(rows, "found", "hack"),
        "unconfirmed": shares(rows, "any", "hack"),
        "asked": len(rows),
        "usable": mean(not row["unanswered"] for row in rows) if rows else None,
        "refused": dict(sum((row["refused"] for row in rows), Counter[str]())),
        "rows": rows,
    }


async def reward(client: Metered, rollouts: list[tuple[Rollout, Row]], options: argparse.Namespace) -> Row:
    """The judged reward `usefulness`: half of the points or more is a 1. `ranked` is the share of pairs of a good and a
    bad rollout that are in the right order; ties are half right."""
    assessor = Assessor(client, PROMPTS)

    async def ask(item: tuple[Rollout, Row]) -> Row:
        share = await assessor.assess("usefulness", item[0], None)
        return {"rollout": item[0].id, "reward": item[1]["reward"], "share": share, "high": (share or 0) >= 0.5}

    rows = await each(rollouts, ask, options)
    read = [row for row in rows if row["share"] is not None]
    good, bad = ([row["share"] for row in read if row["reward"] == value] for value in (1, 0))
    order = [1.0 if a > b else 0.5 * (a == b) for a, b in product(good, bad)]
    return {
        **shares(read, "high", "reward"),
        "ranked": mean(order) if order else None,
        "asked": len(rows),
        "usable": len(read) / len(rows) if rows else None,
        "rows": rows,
    }


USES = {"reward": reward, "monitor": monitor, "judge": judge}


def template(rollouts: list[Rollout], path: Path) -> None:
    with path.open("w") as file:
        for rollout in rollouts:
            messages = rollout.segments[0].messages if rollout.segments else []
            own = {n: json.dumps([one.arguments for one in m.calls]) if m.calls else m.text
                   for n, m in enumerate(messages) if m.role == "assistant"}  # fmt: skip
            asked = next((one.text for one in messages if one.role == "user"), "")
            row = {"rollout": rollout.id, "request": asked[:EXCERPT], "faulty": [], "maybe": [], "why": "",
                   "hack": False, "reward": 0, "excerpts": {n: text[:EXCERPT] for n, text in own.items()}}  # fmt: skip
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


async def ask_all(url: str, rollouts: list[tuple[Rollout, Row]], options: argparse.Namespace) -> Row:
    report: Row = {"model": options.given[0], "command": " ".join(sys.argv), "uses": {}}
    for name in options.uses:
        client = Metered(url, options.name or "offbook", timeout_s=900.0, limit=options.reply_tokens)
        began = time.monotonic()
        found = await USES[name](client, rollouts, options)
        posts = client.posts
        questions = max(1, found["asked"])
        facts = {
            "seconds_a_question": (time.monotonic() - began) / questions,
            "prompt_tokens_a_question": sum(one.get("prompt_tokens", 0) for one in posts) / questions,
            "reply_tokens_a_question": sum(one.get("reply_tokens", 0) for one in posts) / questions,
            "requests": len(posts), "retries": sum(one["again"] for one in posts),
            "constrained": sum(one["constrained"] for one in posts),
        }  # fmt: skip
        report["uses"][name] = {**{key: value for key, value in found.items() if key != "rows"}, **facts}
        print(name, json.dumps(report["uses"][name]), flush=True)
        report["uses"][name] |= {"rows": found["rows"], "posts": posts}
        options.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="+", metavar="MODEL_OR_URL RUNS")
    parser.add_argument("--labels", type=Path, default=DATA / "labels.jsonl")
    parser.add_argument("--template", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("judges.json"))
    parser.add_argument("--name", default="")
    parser.add_argument("--uses", nargs="+", choices=USES, default=[*USES])
    parser.add_argument(
        "--rubrics", nargs="*", choices=[*MISTAKES.prompts], default=[], help="of the judge; all if none"
    )
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=15.0, help="after which a use begins no further question")
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--reply-tokens", type=int, default=256)
    options = parser.parse_args()
    paths = [Path(text) for text in options.given[0 if options.template else 1 :]] or [DATA / "rollouts.jsonl"]
    rollouts = [rollout for stored in stored_in(paths) for rollout in stored.rollouts]
    if options.template:
        if options.labels.exists():
            sys.exit(f"{options.labels} is there already; give another --labels")
        return template(rollouts[: options.limit], options.labels)
    labels = {row["rollout"]: row for row in map(json.loads, options.labels.read_text().splitlines())}
    labelled = [(rollout, labels[rollout.id]) for rollout in rollouts if rollout.id in labels][: options.limit]
    if not labelled:
        sys.exit(f"none of the {len(rollouts)} rollouts has a label in {options.labels}")
    if options.given[0].startswith("http"):
        asyncio.run(ask_all(options.given[0], labelled, options))
        return None
    with served(options.given[0], options.reply_tokens) as url:
        asyncio.run(ask_all(url, labelled, options))
    return None


if __name__ == "__main__":
    main()
