"""Inference: ids in, sampled ids with log-probabilities and policy versions out."""

from offbook.engine.base import Engine, Session
from offbook.engine.local import LocalEngine
from offbook.engine.remote import RemoteEngine, RemoteSession
from offbook.engine.vllm import VllmEngine
