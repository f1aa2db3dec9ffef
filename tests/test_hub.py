"""`offbook export --hub` with the real client, against a hub of one process."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from offbook.core.config import Config, JudgeConfig, load_config
from offbook.core.runfolder import RunFolder, latest_checkpoint
from offbook.evals.hub import card


@pytest.fixture
def hub() -> Iterator[Any]:
    """Takes every file in the commit itself, as the real one does with small files."""

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            server.seen.append(self.path)
            answer: dict[str, Any] = {"url": f"{server.url}/me/agent", "id": "1"}
            if "/preupload/" in self.path:
                paths = [file["path"] for file in json.loads(body)["files"]]
                answer = {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]}
            elif "/commit/" in self.path:
                values = [json.loads(line) for line in body.splitlines()]
                files = [value["value"] for value in values if value["key"] == "file"]
                server.files = {file["path"]: base64.b64decode(file["content"]) for file in files}
                answer = {"commitUrl": f"{server.url}/me/agent/commit/0", "commitOid": "0" * 40}
            data = json.dumps(answer).encode()
            self.send_response(403 if self.headers["Authorization"] != "Bearer hf_good" else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *of: object) -> None:
            """Quiet."""

    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url, server.seen, server.files = f"http://127.0.0.1:{server.server_port}", [], {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    checkpoint = folder.path / "ckpt" / "step_00003"
    checkpoint.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors", "optimizer.safetensors", "state.json", "DONE"):
        (checkpoint / name).write_text(name)
    folder.config_file.write_text(Config(model="Qwen/Qwen3-0.6B", out=str(folder.path)).to_toml())
    return folder


def pushed(run: RunFolder, hub: Any, token: str) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "offbook", "export", str(run.path), "--hub", "me/agent"]
    env = {**os.environ, **own}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_checkpoint_and_its_card_are_pushed_without_the_optimizer(run: RunFolder, hub: Any) -> None:
    done = pushed(run, hub, "hf_good")
    assert (done.returncode, done.stdout) == (0, f"{hub.url}/me/agent\n"), done.stderr
    assert set(hub.files) == {"config.json", "tokenizer.json", "model.safetensors", "README.md"}
    assert hub.files["model.safetensors"] == b"model.safetensors"
    said = hub.files["README.md"].decode()
    assert "base_model: Qwen/Qwen3-0.6B\n" in said
    assert "RL with targeted hints of weight 1" in said
    assert "Steps: 3, " in said
    assert "It was not evaluated" in said


def test_who_may_not_push_gets_one_sentence(run: RunFolder, hub: Any) -> None:
    done = pushed(run, hub, "hf_bad")
    assert done.returncode == 1
    assert done.stderr.startswith("offbook: cannot push to me/agent: ")
    assert done.stderr.count("\n") == 1
    assert not hub.files


def test_the_card_has_the_held_out_numbers_with_intervals(run: RunFolder) -> None:
    (run.path / "eval").mkdir()
    measured = {"solved": 0.5, "reward": 0.5, "intervals": {"solved": [0.25, 0.75]}}
    (run.path / "eval" / "final.json").write_text(json.dumps(measured))
    said = card(run, latest_checkpoint(run))
    assert "| 50.0% |" in said
    assert "25" in said.split("50.0%")[1].splitlines()[0]
    assert "It was not evaluated" not in said


def test_the_card_tells_nothing_of_the_machine(run: RunFolder, tmp_path: Path) -> None:
    tasks, judge = str(tmp_path / "secret-place" / "my-tasks"), "http://10.1.2.3/v1"
    config = load_config([], {"model": "/home/me/model", "tasks.source": tasks, "out": str(tmp_path)})
    judged = JudgeConfig(url=judge, name="m", feedback=1.0)
    run.config_file.write_text(config.model_copy(update={"judge": judged}).to_toml())
    said = card(run, latest_checkpoint(run))
    assert "Tasks: `my-tasks`" in said
    assert not [word for word in ("secret-place", "/home/me", judge, str(tmp_path)) if word in said]
