"""vLLM as an engine, in a process and an environment of its own."""

from offbook.engine.vllm.engine import VllmEngine
from offbook.engine.vllm.find import find_vllm, refuse_missing_engine
from offbook.engine.vllm.server import Server
from offbook.engine.vllm.several import SeveralEngines, servers_of
