"""Runs vLLM's server, in vLLM's environment, and ends when the process that started it ends, even if that is killed.

The starter holds the other end of standard input. Nothing is ever written to it: it ends with the starter. A guard
waits for that, in a process and a session of its own: so a server goes that hangs or is stopped, and its workers too.
"""

import contextlib
import os
import runpy
import signal


def _guard(group: int) -> None:
    os.setsid()
    os.read(0, 1)
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    server = os.getpid()  # the first of its process group
    if not os.fork():
        try:
            _guard(server)
        finally:
            os._exit(0)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
