"""A vLLM server that offbook starts, watches, starts again and stops; or one that the user runs.

It listens on this machine alone and ends with offbook, even if that is killed. Its output goes to a log file.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from offbook.core.client import KEY
from offbook.core.config import VllmConfig
from offbook.core.routers import Mixture
from offbook.engine.vllm.find import Found, find_vllm
from offbook.engine.vllm.gpus import VISIBLE
from offbook.types import ModelLost, ServerLost

INSIDE = Path(__file__).parent / "inside"  # what runs in vLLM's environment
POLL_S = 0.2
STOP_S = 10.0  # to end by itself
GONE_S = 5.0  # for what was killed to be gone
CALL_S = 60.0
DRAFTS = "--speculative-config"  # of vLLM's options
BATCHED_TOKENS = 16_384  # in one forward, on a GPU: what vLLM takes for itself where it is not a server
SHARE = 0.4  # of a GPU by default
# Why it did not come up, in its own words, and what to do about it.
REASONS = {
    r"less than desired GPU memory utilization": "too little of the GPU's memory is free: lower engine.vllm.gpu_share",
    r"No available memory for the cache blocks": "its share of the GPU holds the model and nothing more: raise "
    "engine.vllm.gpu_share",
    r"larger than the available KV cache": "its share of the GPU does not hold one rollout: raise "
    "engine.vllm.gpu_share or lower harness.context",
    r"out of memory": "the GPU's memory did not suffice: lower engine.vllm.gpu_share",
    r"address already in use": "another process has taken its port meanwhile: start again",
    r"AuxOutput Connector|routed-experts (capture|is incompatible)": "it cannot say which experts tokens go to with "
    "this model or these options: add --no-enable-return-routed-experts to engine.vllm.options",
    r"No module named '?vllm": "the interpreter has no vLLM in it: name another in engine.vllm.python",
}

# It measures what is free while it comes up, and ends where another process gives some back meanwhile.
DISTURBED = "Error in memory profiling"

Progress = Callable[[str, float], None]
_GIVEN_PORTS: set[int] = set()


class Server:
    """Not started until `start`. Calls are synchronous and have a timeout; requests of rollouts go another way.

    `name` is for people, `gpus` are those that it sees, as CUDA names them; empty for all.
    """

    def __init__(
        self,
        model: Path,
        settings: VllmConfig,
        context: int,
        log: Path,
        progress: Progress,
        mixture: Mixture | None = None,
        name: str = "vLLM",
        gpus: str = "",
    ):
        self.name = name
        self.gpus = gpus
        self.model = model
        self.settings = settings
        self.context = context
        self.log = log
        self.progress = progress
        self.mixture = mixture  # of experts, if the model is one
        self.lora_rank = 0  # of the adapters that it will be given; 0 is none
        self.url = settings.url.rstrip("/").removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if self.url and os.environ.get(KEY) else {}
        self.on_cpu = False
        self.is_unwanted = False  # a start in another thread is given up
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx2.Client(timeout=CALL_S, trust_env=not self.is_ours)
        self._log_start = 0

    @property
    def is_ours(self) -> bool:
        return not self.settings.url

    @property
    def where_it_talks(self) -> str:
        return f"; what it said is in {self.log}" if self.is_ours else ""

    def start(self) -> None:
        """Return when it answers."""
        deadline = time.monotonic() + self.settings.start_s
        if self.is_ours and not self.is_unwanted:
            self._launch()
        while True:
            with contextlib.suppress(httpx2.RequestError):
                if self._http.get(f"{self.url}/health", headers=self.headers, timeout=2.0).is_success:
                    break
            if self.is_unwanted:
                self.stop()  # it may have been started in the same moment
                raise ServerLost(f"{self.name} was ended while it came up")
            if self._process is not None and self._process.poll() is not None:
                self.stop()
                if DISTURBED not in self._said():
                    raise ModelLost(f"{self.name} did not start: {self._reason()}{self.where_it_talks}")
                self._launch()
            if time.monotonic() > deadline:
                self.stop()
                waited = f"after {self.settings.start_s:g} s (engine.vllm.start_s)"
                raise ServerLost(f"vLLM at {self.url} does not answer {waited}{self.where_it_talks}")
            self.progress(f"{self.name}: starting", 1 - (deadline - time.monotonic()) / self.settings.start_s)
            time.sleep(POLL_S)
        self.progress(f"{self.name}: ready", 1.0)

    def stop(self) -> None:
        """The whole process group, in any case."""
        process = self._process
        self._process = None
        if process is None:
            return
        atexit.unregister(self.stop)
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):  # what says that the group is empty, and the GPU's memory free
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            deadline = time.monotonic() + GONE_S
            while time.monotonic() < deadline:
                os.killpg(process.pid, 0)
                time.sleep(0.02)
        assert process.stdin is not None
        process.stdin.close()

    def call(self, path: str, body: dict[str, Any] | None = None, deadline_s: float = CALL_S) -> httpx2.Response:
        """A call that has to succeed."""
        name = path.partition("?")[0]
        try:
            response = self._http.post(self.url + path, json=body or {}, headers=self.headers, timeout=deadline_s)
        except httpx2.TimeoutException:
            raise ServerLost(f"{self.name} hangs: no answer to {name} for {deadline_s:g} s") from None
        except httpx2.RequestError as error:
            raise ServerLost(f"{self.name} does not answer {name} ({type(error).__name__})") from None
        if response.is_success:
            return response
        if response.status_code == 404:
            needs = "it has to run with VLLM_SERVER_DEV_MODE=1 and the options of docs/engines.md"
            raise ModelLost(f"the vLLM server at {self.url} has no {name}: {needs}")
        said = " ".join(response.text.split())[:300]
        raise ModelLost(f"{self.name} refused {name} with {response.status_code}: {said}")

    def rpc(self, method: str, argument: str, deadline_s: float) -> list[dict[str, Any]]:
        """A method of every worker. The server's own deadline is later: it would call a worker that hangs an error."""
        body = {"method": method, "args": [argument], "timeout": deadline_s + 5}
        answers: list[dict[str, Any]] = self.call("/collective_rpc", body, deadline_s).json()["results"]
        return answers

    def command(self, found: Found, port: int) -> list[str]:
        settings = self.settings
        options: dict[str, object] = {
            "model": self.model,
            "served-model-name": "policy",
            "host": "127.0.0.1",
            "port": port,
            "dtype": "float32" if found.on_cpu else "bfloat16",
            "max-model-len": self.context,
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "worker-extension-cls": "offbook_worker.OffbookWorker",
            "middleware": "offbook_tokens.Tokens",
            "uvicorn-log-level": "warning",
        }
        if not found.on_cpu:
            share = SHARE if settings.gpu_share == "auto" else settings.gpu_share
            options |= {"gpu-memory-utilization": share, "tensor-parallel-size": settings.gpus}
            options |= {"max-num-batched-tokens": BATCHED_TOKENS}
        flags = ["tokens-only", "disable-uvicorn-access-log", "no-enable-log-requests"]
        flags += [] if DRAFTS in settings.options else ["disable-log-stats"]  # they say how many drafts are kept
        if self.lora_rank:
            flags.append("enable-lora")
            options |= {"max-lora-rank": self.lora_rank, "max-loras": 1}
        flags += ["enable-sleep-mode"] if settings.sleep else []
        flags += ["enable-return-routed-experts"] if self.mixture and not found.on_cpu else []
        given = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        script = str(INSIDE / "offbook_serve.py")
        return [found.python, script, *given, *(f"--{flag}" for flag in flags), *settings.options]

    def _launch(self) -> None:
        self.stop()
        found = find_vllm(self.settings.python)
        port = _free_port()
        self.on_cpu = found.on_cpu
        self.url = f"http://127.0.0.1:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        own = os.environ.get("PYTHONPATH", "") if found.python == sys.executable else ""  # vLLM may be on it
        more = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(INSIDE), own])),
            "PYTHONUNBUFFERED": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # a rollout may be in its sandbox for minutes between two messages
        }
        cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if found.on_cpu else {}
        more |= {VISIBLE: self.gpus} if self.gpus else {}
        environment = {**cpu, **os.environ, **more}
        environment.pop(KEY, None)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.command(found, port),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        atexit.register(self.stop)

    def _said(self) -> str:
        """Since the last start."""
        if not self.log.is_file():
            return ""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def _reason(self) -> str:
        said = self._said()
        for pattern, reason in REASONS.items():
            if re.search(pattern, said, re.IGNORECASE):
                return reason
        causes = re.findall(r"(?:\w+(?:Error|Exception)|error): (?!Engine core init|.*See root cause).*", said)
        return causes[-1].strip()[:300] if causes else "it does not say why"


def _free_port() -> int:
    """Servers that start side by side listen much later, so a port is given only once by this process."""
    while True:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
            if port not in _GIVEN_PORTS:
                _GIVEN_PORTS.add(port)  # while it is bound here
                return port
