"""vLLM as an engine, in a process and an environment of its own."""

from offbook.engine.vllm.engine import VllmEngine, VllmSession
from offbook.engine.vllm.find import find_vllm, refuse_missing_engine
from offbook.engine.vllm.server import Server
from offbook.engine.vllm.several import CountedSession, SeveralEngines, servers_of

__all__ = [
    "AnyVllm",
    "AnyVllmSession",
    "CountedSession",
    "Server",
    "SeveralEngines",
    "VllmEngine",
    "VllmSession",
    "find_vllm",
    "refuse_missing_engine",
    "servers_of",
]

AnyVllm = VllmEngine | SeveralEngines
AnyVllmSession = VllmSession | CountedSession
