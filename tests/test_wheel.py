"""What people install: the wheel has all that the package reads, and works where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import offbook

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**clean, **variables}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


RECORDS = """#!/bin/sh
echo "$*" >> "$RECORD"
case "$*" in
*"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*--index-url*) [ -z "$UNREACHABLE" ] ;;
esac
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("machine", ["no GPU", "no GPU and no index", "GPU"])
def test_make_installs_the_cpu_build_of_torch_where_there_is_no_gpu(tmp_path: Path, machine: str) -> None:
    """In a folder with a space in its name, by a Python that is called by a relative path."""
    clone, tools = tmp_path / "a clone", tmp_path / "to ols"
    clone.mkdir()
    tools.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, clone)
    for name in ("python", *(["nvidia-smi"] if machine == "GPU" else [])):
        (tools / name).write_text(RECORDS)
        (tools / name).chmod(0o755)
    for name in ("make", "sh", "mkdir", "cp", "touch"):
        (tools / name).symlink_to(str(shutil.which(name)))
    unreachable = "1" if machine == "no GPU and no index" else ""
    record, path = tmp_path / "record", {"PATH": str(tools), "MAKEFLAGS": "", "UNREACHABLE": unreachable}
    said = run(tools / "make", ".venv/ready", "PYTHON=../to ols/python", cwd=clone, RECORD=str(record), **path)
    venv, *pip = [line.partition(" --constraint constraints.txt ")[::2] for line in record.read_text().splitlines()]
    assert venv == ("-m venv .venv", "")
    first = [wanted for _, wanted in pip[:-2]]
    assert [wanted.endswith("whl/cpu torch") for wanted in first] == ([] if machine == "GPU" else [True])
    assert [wanted for _, wanted in pip[-2:]] == ["torch", "--editable .[dev]"]
    assert ("taking the default build" in said, "CPU build" in said) == (bool(unreachable), machine != "GPU")
    assert (clone / ".venv" / "ready").is_file()


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--quiet", "--wheel-dir", tmp_path, cwd=tmp_path)
    (wheel,) = tmp_path.glob("offbook-*.whl")
    package = ROOT / "src"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {"toml", "md", "html"} <= {path.suffix[1:] for path in files}, "recipes, prompts, the page"
    with zipfile.ZipFile(wheel) as archive:
        assert {path.relative_to(package).as_posix() for path in files} <= set(archive.namelist())

    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    # Behind its own packages, those of this environment: torch is not installed twice. Lines of .pth files in there
    # are not followed, so an editable offbook is not found.
    (site / "others.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")) + "\n")
    where = run(python, "-c", "import offbook; print(offbook.__file__)", cwd=tmp_path)
    assert where.startswith(str(site))
    command = tmp_path / "env" / "bin" / "offbook"
    assert run(command, "--version", cwd=tmp_path) == f"offbook {offbook.__version__}\n"
    assert "quickstart" in run(command, "--help", cwd=tmp_path)
    assert 'profile = "pocket"' in run(command, "train", "@", "pocket", "--dry-run", cwd=tmp_path)


def dockerfile() -> list[str]:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_dockerfile_runs_the_quickstart_and_not_as_root() -> None:
    lines = dockerfile()
    assert lines[0] == "FROM python:3.11-slim"
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in lines} <= known
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1] if name[0] != "-"]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    assert lines[-3:] == ["USER agent", 'ENTRYPOINT ["offbook"]', 'CMD ["quickstart"]']
    (installs,) = [line for line in lines if "pip install" in line]
    assert installs.index("whl/cpu") < installs.index("./offbook"), "torch for the CPU comes first"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("docker") is None, reason="there is no docker here")
def test_the_image_is_built() -> None:
    if subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("docker does not run here")
    subprocess.run(["docker", "build", "--tag", "offbook-test", str(ROOT)], check=True, timeout=1700)
    said = subprocess.run(
        ["docker", "run", "--rm", "offbook-test", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout == f"offbook {offbook.__version__}\n"
