"""vLLM as a configuration has it: one server, or several."""

from __future__ import annotations

import json
from pathlib import Path

from offbook.core.config import Config, EngineConfig, VllmConfig
from offbook.core.draft import FOLDER
from offbook.core.runfolder import is_adapter
from offbook.engine.vllm import AnyVllm, SeveralEngines, VllmEngine, servers_of
from offbook.engine.vllm.server import DRAFTS
from offbook.rl.models import Progress, chat_folder, mixture_in, positions
from offbook.train.lora import stored_adapter


def vllm_engine(config: Config, model: Path, stop_ids: frozenset[int], progress: Progress) -> AnyVllm:
    """For the model in a folder, or the adapter."""
    settings, base = config.engine, chat_folder(model)
    context, logs = min(config.harness.context, positions(base)), Path(config.out) / "logs"
    servers = servers_of(base, with_drafts(settings, model), context, logs, progress, mixture_in(base))
    engines = [VllmEngine(server, stop_ids, settings.temperature, settings.timeout_s) for server in servers]
    vllm = SeveralEngines(engines) if len(engines) > 1 else engines[0]
    if is_adapter(model):
        vllm.apply(stored_adapter(model))
    return vllm


def with_drafts(settings: EngineConfig, model: Path) -> VllmConfig:
    """With a draft head, as vLLM takes it. By default that drafts the likeliest token alone, of which few are kept."""
    if not settings.draft_tokens:
        return settings.vllm
    head = Path(settings.draft or model)
    head = head / FOLDER if (head / FOLDER).is_dir() else head
    how = {"method": "eagle", "model": str(head.resolve()), "num_speculative_tokens": settings.draft_tokens}
    option = json.dumps({**how, "draft_sample_method": "probabilistic"})
    return settings.vllm.model_copy(update={"options": [*settings.vllm.options, DRAFTS, option]})
