"""What a run folder keeps: one writer at a time, links and pipes as they are, and the same run wherever it lies."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_model
from safetensors.torch import load_file, save_file

from offbook.core import runfolder
from offbook.core.config import Config, FeedbackConfig, RewardsConfig, TasksConfig, TrainConfig
from offbook.core.runfolder import RunFolder, dump_lines, load_lines, only_writer, write_atomic
from offbook.rl.collector import Collector
from offbook.rl.resume import begin_run, resumed, rollouts_fingerprint
from offbook.types import Branch, OffbookError, Sample

WRITER = """
import sys, time
from pathlib import Path
from offbook.core.runfolder import only_writer
with only_writer(Path(sys.argv[1])):
    print("writing", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@contextmanager
def writer(folder: Path, seconds: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes into a folder."""
    command = [sys.executable, "-c", WRITER, str(folder), str(seconds)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a background job
    )
    try:
        assert process.stdout
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def is_free(folder: Path) -> bool:
    try:
        with only_writer(folder):
            return True
    except OffbookError:
        return False


def test_a_second_writer_is_refused_and_told_who_the_first_one_is(tmp_path: Path) -> None:
    with writer(tmp_path / "run") as first:
        sentence = rf"run is being written by process {first.pid} on \S+ since \d{{4}}-"
        with pytest.raises(OffbookError, match=sentence), only_writer(tmp_path / "run"):
            pass
        RunFolder(tmp_path / "run").config_file.touch()
        assert RunFolder.open(tmp_path / "run").metrics() == ([], 0), "readers are not held up"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_writer_that_was_stopped_is_in_nobody_s_way(tmp_path: Path, number: int) -> None:
    with writer(tmp_path / "run") as first:
        first.send_signal(number)
        first.wait(timeout=30)
        if number == signal.SIGTERM:
            assert first.returncode == -number, "it ends as it did"
        assert is_free(tmp_path / "run"), "at once"


def test_a_lock_is_never_a_link(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("kept")
    with pytest.raises(OffbookError, match="is a link, and a lock is never one"):
        only_writer(tmp_path).__enter__()
    assert (tmp_path / "precious").read_text() == "kept"


def test_of_many_that_take_a_lock_over_one_gets_it(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runfolder, "LOCK_S", 0.0)
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # so that they do come between each other
    together = threading.Barrier(6)
    gone = json.dumps([2**22 + 1, os.uname().nodename, ""])

    def take() -> bool:
        together.wait(timeout=30)
        try:
            with only_writer(tmp_path):
                together.wait(timeout=30)  # until all have tried
                return True
        except OffbookError:
            together.wait(timeout=30)
            return False

    with ThreadPoolExecutor(6) as threads:
        for _ in range(50):
            (tmp_path / ".lock").write_text(gone)
            assert sum(each.result() for each in [threads.submit(take) for _ in range(6)]) == 1


def test_nothing_is_left_where_nothing_was_written(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), only_writer(tmp_path / "run"):
        math.floor(1 / 0)
    assert not (tmp_path / "run").exists()


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("old")
    (tmp_path / "link").symlink_to("there/file")
    (tmp_path / "dangling").symlink_to("there/new")
    for name in ("link", "dangling"):
        write_atomic(tmp_path / name, "new")
        assert (tmp_path / name).is_symlink()
    assert [(tmp_path / "there" / name).read_text() for name in ("file", "new")] == ["new", "new"]
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"file", "new"}


def test_what_is_no_plain_file_is_written_to(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_atomic(pipe, "through it")
    reader.join(timeout=10)
    assert read == ["through it"]
    assert pipe.is_fifo()
    code = "import sys; from pathlib import Path; from offbook.core.runfolder import write_atomic as write\n"
    code += "print('before', flush=True); write(Path('/dev/stdout'), 'data\\n')"
    with open(tmp_path / "out", "a") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\ndata\n"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"before\ndata\n"
    assert os.path.islink("/dev/stdout")


def test_what_is_no_number_comes_back_as_it_was(tmp_path: Path) -> None:
    branch = Branch(3, [1], ((4, 5),), weight=math.inf)
    sample = Sample([1, 2], [math.nan, -math.inf], [0.5, math.nan], branches=[branch])
    path = RunFolder(tmp_path).write_samples(3, [sample, Sample([3])])
    assert path == tmp_path / "aside" / "step_00003.samples.jsonl"
    (kept, plain), unreadable = load_lines(path, Sample)
    assert unreadable == 0
    assert (repr(kept), plain) == (repr(sample), Sample([3]))
    assert dump_lines([kept]) == dump_lines([sample])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "optimizer.safetensors").write_bytes(b"state")
    return tmp_path / "model"


def stored(folder: Path, config: Config) -> RunFolder:
    """A run with a checkpoint, as far as it matters here."""
    (folder / "ckpt" / "step_00001").mkdir(parents=True)
    (folder / "ckpt" / "step_00001" / "DONE").touch()
    run = RunFolder(folder)
    run.config_file.write_text(config.to_toml())
    return run


def test_where_a_run_lies_is_no_part_of_what_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "copy")
    Path("tasks").mkdir()
    Path("own.py").write_text("def tried(task, rollout):\n    return 1.0\n")
    shutil.copy("own.py", "same.py")

    def config(out: str, model: str, source: str, file: str, **train: Any) -> Config:
        sections = {"tasks": TasksConfig(source=source), "rewards": RewardsConfig(files=[file])}
        sections["feedback"] = FeedbackConfig(files=[file])
        return Config(out=out, model=model, train=TrainConfig(**train), **sections)

    run = stored(Path("k1"), config("k1", "model", "tasks", "own.py"))
    begin_run(run, config("k1", "model", "tasks", "own.py"))
    for out in ("k1/", "./k1", str(tmp_path / "k1")):
        resumed(run, config(out, "./model", str(tmp_path / "tasks"), "./own.py"))
    Path("k1").rename("k2")
    moved = RunFolder("k2")
    resumed(moved, config("k2", "copy/", "tasks/", "same.py", steps=99, on_nonfinite="skip"))
    Path("same.py").write_text("def tried(task, rollout):\n    return 3.0\n")
    Path("others").mkdir()
    other_model = load_file("copy/model.safetensors")
    other_model["model.norm.weight"][7] += 1e-6
    save_file(other_model, "copy/model.safetensors")
    for changed in (("copy", "tasks", "own.py"), ("model", "others", "own.py"), ("model", "tasks", "same.py")):
        with pytest.raises(OffbookError, match=r"another configuration \((model|tasks.source|feedback.files) is"):
            resumed(moved, config("k2", *changed))


def fingerprint(model: Path) -> dict[str, Any]:
    return rollouts_fingerprint(Collector(Config(model="given by its folder"), model), [])


def test_a_model_is_known_by_its_content(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fingerprint(model)
    monkeypatch.chdir(tmp_path)
    shutil.copytree("model", "copy")
    for path in Path("copy").iterdir():
        os.utime(path, times=(1, 1))
    Path("copy/optimizer.safetensors").unlink()
    assert fingerprint(Path("model")) == fingerprint(Path("./copy")) == first
    tensors = load_file("copy/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][40, 7] *= 1 + 1e-6  # far less than an optimizer step
    save_file(tensors, "copy/model.safetensors", {"format": "pt"})
    assert Path("copy/model.safetensors").stat().st_size == Path("model/model.safetensors").stat().st_size
    assert fingerprint(Path("copy"))["weights"] != first["weights"]


def _write_often(path: Path, letter: str) -> None:
    for _ in range(150):
        write_atomic(path, letter * 50_000)


def test_processes_that_write_one_file_do_not_meet(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write_often, args=(tmp_path / "made.jsonl", letter)) for letter in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert (tmp_path / "made.jsonl").read_text() in ("a" * 50_000, "b" * 50_000)
    assert [path.name for path in tmp_path.iterdir()] == ["made.jsonl"]
