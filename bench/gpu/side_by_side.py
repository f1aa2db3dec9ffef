"""The cells of proof.py side by side on one GPU: imitations first, beside them vLLM servers that the lanes share, then
as many arms at a time as there are lanes.

    python bench/gpu/side_by_side.py --lanes 6 --servers 3 --model smollm2-135m --seeds 0 1 2 --tiers 1 2 --steps 12 \\
        --engine vllm --budget-minutes 25 --out runs/proof

All other options are proof.py's. An arm is a process of its own, which says what it does in OUT/logs; its result is in
OUT/results when it is over, and what is there is not done again. The controls have their targets from the rules that
the look of the seed's `hints` arm kept, so they wait for that. Rollouts of several arms share the cores: with 16 and a
server per lane, six arms took 20 s per step where three took 12; with two servers for all their engines were at 100% of
a core. CUDA's MPS lets the processes compute at the same time.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import proof
from proof_report import report

from offbook.core.config import VllmConfig
from offbook.engine.vllm import Server
from offbook.engine.vllm.weights import LORA_RANKS

TRIES = 2
CACHE_BYTES = 7_000_000_000  # for a lane. Said, since vLLM takes what others allocate meanwhile for its own
FIRST = ("hints", "rl")
OWN = ("--lanes", "--servers", "--json", "--markdown")  # options that are not proof.py's, or not for each process
Cell = tuple[str, int]


@dataclass
class Lanes:
    experiment: proof.Experiment
    given: list[str]  # proof.py's options, as they were given
    waiting: list[Cell]
    to_come: set[Cell] = field(default_factory=set)  # waiting, or being run
    failed: list[Cell] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.to_come.update(self.waiting)

    @property
    def out(self) -> Path:
        return self.experiment.out

    def imitate(self, seed: int) -> None:
        """The cells of a seed without a start fail with it."""
        if not self.experiment.start_folder(seed).is_dir():
            self.run(["--starts", "--seeds", str(seed)], f"start-{seed}")
        if not self.experiment.start_folder(seed).is_dir():
            proof.say(f"start of seed {seed}: FAILED, see {self.out / 'logs' / f'start-{seed}'}")
            with self.changed:
                self.failed += [cell for cell in self.waiting if cell[1] == seed]
                self.waiting = [cell for cell in self.waiting if cell[1] != seed]

    def serve(self, number: int, lanes: int) -> Server:
        """For as many lanes, each with an adapter of its own, and the one that comes after it."""
        options = self.experiment.options
        more = {"kv-cache-memory-bytes": lanes * CACHE_BYTES, "max-num-batched-tokens": 8192}
        more |= {"max-num-seqs": lanes * options.parallel}
        if options.lora_rank:
            more |= {"max-loras": lanes + 1, "max-cpu-loras": 2 * lanes + 1}
        words = [word for name, value in more.items() for word in (f"--{name}", str(value))]
        settings = VllmConfig(gpu_share=0.05, options=words)
        log = self.out / "logs" / f"vllm-{number}"
        server = Server(self.experiment.base(), settings, options.context, log, lambda stage, share: None)
        if rank := options.lora_rank:
            server.lora_rank = min((room for room in LORA_RANKS if room >= rank), default=rank)
        server.start()
        proof.say(f"vLLM server {number} is up")
        return server

    def work(self, server: Future[Server] | None) -> None:
        """Cells, until there are none or the budget is spent."""
        at = ["--set", f"engine.vllm.url={server.result().url}"] if server else []
        while cell := self.take():
            name, seed = cell
            which = ["--arms", name, "--seeds", str(seed)]
            tries = TRIES
            while tries and not self.experiment.is_measured(*cell) and self.experiment.left_s() > 0:
                self.run([*which, *at], f"{name}-{seed}")
                tries -= 1
            done = self.experiment.is_measured(*cell)
            with self.changed:
                self.to_come.remove(cell)
                self.failed += [] if done else [cell]
                self.changed.notify_all()
            proof.say(f"{name}, seed {seed}: {'done' if done else 'not done'}")

    def take(self) -> Cell | None:
        """The first whose start is there, and whose rules, if others say which they are."""
        with self.changed:
            while self.waiting and self.experiment.left_s() > 0:
                for cell in self.waiting:
                    if self.is_ready(*cell):
                        self.waiting.remove(cell)
                        return cell
                self.changed.wait(1.0)
        return None

    def is_ready(self, name: str, seed: int) -> bool:
        if not self.experiment.start_folder(seed).is_dir():
            return False
        if name in proof.SAME_RUN:  # which it goes on with
            return (proof.SAME_RUN[name], seed) not in self.to_come
        look = self.out / "runs" / "hints" / f"seed-{seed}" / "look.jsonl"
        return name in ("before", *FIRST) or look.is_file() or ("hints", seed) not in self.to_come

    def run(self, options: list[str], name: str) -> None:
        """A process of proof.py. What it did is seen by its files."""
        left = max(0.1, self.experiment.left_s() / 60)
        command = [sys.executable, str(Path(proof.__file__)), *self.given, *options, "--budget-minutes", str(left)]
        with (self.out / "logs" / name).open("ab") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)


def main() -> None:
    arguments = proof.parser()
    arguments.add_argument("--lanes", type=int, default=6, help="arms at a time")
    arguments.add_argument("--servers", type=int, default=3, help="of vLLM, that the lanes share")
    options = arguments.parse_args()
    experiment = proof.Experiment(options)
    (experiment.out / "logs").mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        experiment.prepare(seed)
    experiment.base()
    cells = [cell for cell in proof.cells(options) if not experiment.is_measured(*cell)]
    lanes = Lanes(experiment, without_own(sys.argv[1:]), sorted(cells, key=lambda cell: cell[0] not in FIRST))
    began, number = time.monotonic(), min(options.servers, options.lanes) if options.engine == "vllm" else 0
    with ThreadPoolExecutor(number + len(options.seeds) + options.lanes) as pool:
        shared = [pool.submit(lanes.serve, at, -(-options.lanes // number)) for at in range(number)]
        imitations = [pool.submit(lanes.imitate, seed) for seed in options.seeds]
        work = [pool.submit(lanes.work, shared[lane % number] if shared else None) for lane in range(options.lanes)]
        try:
            for job in [*imitations, *work]:
                job.result()
        finally:
            for server in shared:
                if not server.exception():
                    server.result().stop()
    proof.say(f"{len(cells) - len(lanes.to_come)} cells in {(time.monotonic() - began) / 60:.1f} minutes")
    report(experiment.out / "results", options.json, options.markdown)
    if left := [*lanes.failed, *lanes.waiting]:
        sys.exit("failed or left: " + ", ".join(f"{name}, seed {seed}" for name, seed in left))


def without_own(given: list[str]) -> list[str]:
    """The options that are not for each process, with their values."""
    at = [number for number, word in enumerate(given) if word in OWN]
    return [word for number, word in enumerate(given) if number not in at and number - 1 not in at]


if __name__ == "__main__":
    main()
