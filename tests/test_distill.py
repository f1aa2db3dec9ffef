"""offbook distill: faults in anybody's logs are taught by hints, and it is said how far the model is from the logs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offbook.agent.chat import chat_for
from offbook.agent.recorder import Asked, Recorder, Said
from offbook.core.config import load_config
from offbook.core.runfolder import RunFolder, dump_lines
from offbook.engine import LocalEngine
from offbook.rl.models import load_model
from offbook.stages.distill import distill
from offbook.types import Limits, OffbookError, Rollout

READ = {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}


def openai_log(number: int) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "open_file", "arguments": '{"path": "a.py"}'}}
    return {
        "id": f"log-{number}",
        "tools": [{"type": "function", "function": READ}],
        "messages": [
            {"role": "user", "content": f"look at a.py, {number}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "error: no such tool"},
            {"role": "assistant", "content": "<tool_call>{broken"},
        ],
    }


def recorded(model: Path, count: int) -> list[Rollout]:
    """Sessions of the model itself, about each of which somebody said something."""
    chat = chat_for(model)

    async def main() -> list[Rollout]:
        engine = LocalEngine(load_model(model), chat.stop_ids, mode="continuous")
        found = []
        for number in range(count):
            rollout = Rollout(f"own-{number}", "t", "t", (), foreign=True)
            session = Recorder(rollout, chat, engine.open, Limits(message_tokens=24))
            await session.answer(Asked((Said("user", f"read pkg/core.py {number}"),)))
            session.note("feedback", "Reminder: say what you do first.")
            found.append(session.end())
        return found

    return asyncio.run(main())


def test_faults_are_taught_and_the_distance_is_told(model: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "openai.jsonl").write_text("\n".join(json.dumps(openai_log(number)) for number in range(4)))
    (logs / "own.jsonl").write_bytes(dump_lines(recorded(model, 4)))
    told: list[str] = []
    given = {
        "model": str(model),
        "sft.data": json.dumps([str(logs)]),
        "out": str(tmp_path / "run"),
        "train.groups": "2",
        "train.group_size": "2",
        "feedback.gate": "0",
    }
    config = load_config([], given)
    folder = distill(config, epochs=2, tell=told.append)
    rows, _ = folder.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert sum(row["hinted_targets"] for row in rows) == 2 * (4 + 4 + 4), "no such tool, no call, what was said"
    assert all(row["gradient_norm"] > 0 for row in rows)
    mismatch = json.loads((folder.path / "mismatch.json").read_text())
    assert (mismatch["segments"], mismatch["written_again"]) == (8, 4)
    assert mismatch["recorded"] > 0
    assert mismatch["difference"] < 1e-3, "its own tokens, by the same weights"
    assert any("4 of them written again" in line for line in told)
    feedback = [item for step in (1, 2, 3, 4) for item in folder.feedback(step)[0]]
    assert {item.target.rule for item in feedback} == {"unknown_tool", "malformed_arguments", "said"}
    assert all(item.divergence for item in feedback)
    assert RunFolder.open(folder.path).checkpoints().keys() >= {4}
    silent = load_config([], {**given, "out": str(tmp_path / "silent"), "feedback.rule_weights.said": "0"})
    without = distill(silent, epochs=2)
    taught = [item.target for step in (1, 2, 3, 4) for item in without.feedback(step)[0]]
    assert {target.rule for target in taught} == {"unknown_tool", "malformed_arguments"}, (
        "what people say has no weight"
    )
    of_logs = [target for target in taught if "/log-" in target.rollout]  # its own messages may have faults, too
    assert len(of_logs) == 2 * (4 + 4)
    (logs / "own.jsonl").write_bytes(dump_lines(recorded(model, 3)))
    with pytest.raises(OffbookError, match="other data"):
        distill(config, epochs=2)


def test_logs_without_a_fault_teach_nothing(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    said = [{"role": role, "content": "hi"} for role in ("user", "assistant")]
    path.write_text(json.dumps({"messages": said}))
    given = {"model": str(model), "sft.data": json.dumps([str(path)]), "out": str(tmp_path / "run")}
    with pytest.raises(OffbookError, match="nothing to train on"):
        distill(load_config([], given))
