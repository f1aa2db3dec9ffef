"""Runs vLLM's server, in vLLM's environment, and ends with whoever started it, however that ended.

The starter holds the other end of standard input. Nothing is ever written to it: it ends with the starter.
"""

import os
import runpy
import signal
import threading


def _end_with_starter() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)  # the engine and its workers, too


if __name__ == "__main__":
    threading.Thread(target=_end_with_starter, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
