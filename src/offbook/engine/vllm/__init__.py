"""vLLM as an engine, in a process and an environment of its own."""

from offbook.engine.vllm.engine import VllmEngine, VllmSession
from offbook.engine.vllm.find import find_vllm, refuse_missing_engine
from offbook.engine.vllm.server import Server

__all__ = ["Server", "VllmEngine", "VllmSession", "find_vllm", "refuse_missing_engine"]
