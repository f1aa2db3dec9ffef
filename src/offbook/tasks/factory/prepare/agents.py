"""Set-up by an agent, for a repository that does not get ready by itself.

The agent works in a sandbox with a way out to the package index, and installs and mocks what is missing. What it
proposes is verified in sandboxes without a network: the package is imported, and most of its tests pass. It has five
tries, each with the problem of the last one.

Of its work two things are kept: the packages and modules in .setup/packages, which go to deps/, and .setup/start.sh,
which is run in every sandbox of the repository. Left out: services that outlive a command, compilers, system packages.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from offbook.agent.chat import byte_chat, render_call
from offbook.agent.harness import Harness, run_agent
from offbook.core.client import Client
from offbook.engine.remote import RemoteEngine
from offbook.sandbox import SandboxSpec
from offbook.sandbox.egress import SOCKET, EgressProxy, OutwardSandbox, entry
from offbook.tasks.factory.instruction.instruct import PROMPTS
from offbook.tasks.factory.prepare.dependencies import LIMIT_MB, settle
from offbook.tasks.factory.prepare.prepare import Progress, Stuck
from offbook.tasks.factory.prepare.source import pip_indexes, without_secrets
from offbook.tasks.factory.types import Repository, Unprepared
from offbook.types import Limits, MachineFault, ModelLost, OffbookError, Task

TRIES = 5
PASSING = 0.5  # of the tests, at least
# Tokens are bytes here: a model's own are not known.
LIMITS = Limits(turns=60, tokens=4_000_000, context=600_000, message_tokens=8192, command_s=600.0, wall_s=3600.0)
TOOLS = ("read_file", "edit_file", "list_dir", "search_codebase", "run_command", "finish")
AGAIN = "What was wrong after your last try, of which all files are still there:\n\n"
PACKAGES = "/app/.setup/packages"


@dataclass(frozen=True)
class SetUpAgent:
    """The model `name` behind `url`. `allow` names hosts, besides the package index, that it may reach."""

    url: str
    name: str
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Client(self.url, self.name)  # refuses what is no URL now, and not after a repository has failed
        for host in self.allow:
            entry(host)

    async def __call__(self, stuck: Stuck, spec: SandboxSpec, progress: Progress) -> Repository:
        """What `stuck.finished` makes of it in the end, or Unprepared."""
        if spec.backend != "bwrap":
            raise OffbookError(f"agents set repositories up in sandboxes of the kind bwrap, and not {spec.backend}")
        draft = stuck.draft
        indexes = [without_secrets(url) for url in await pip_indexes() if url.startswith("https:")]
        hosts = [urlsplit(url).netloc for url in indexes]
        if "pypi.org" in hosts:
            hosts.append("files.pythonhosted.org")
        allow = tuple(dict.fromkeys([*hosts, *self.allow]))
        (draft.folder / "deps").rename(draft.folder / "deps.before")
        shutil.copytree(draft.folder / "deps.before", draft.folder / "deps")
        problem = ""
        with tempfile.TemporaryDirectory(prefix="offbook-door-") as place:
            door = Path(place)
            larger = replace(spec, disk_mb=LIMIT_MB)
            mounts = {"/opt/pip/pip": Path(str(metadata.distribution("pip").locate_file("pip")))}
            variables = _variables(draft, indexes)
            async with (
                EgressProxy(door / SOCKET, allow),
                OutwardSandbox(draft.tree, larger, door, variables, python=draft.folder, mounts=mounts) as sandbox,
            ):
                for number in range(1, TRIES + 1):
                    progress(f"{draft.name}: an agent sets it up, try {number} of {TRIES}")
                    await self._converse(stuck, sandbox, AGAIN + problem if problem else "", allow)
                    try:
                        repository = await _verified(stuck, sandbox)
                        shutil.rmtree(draft.folder / "deps.before")
                        return repository
                    except (Unprepared, MachineFault) as error:
                        problem = str(error)
        raise Unprepared(f"{stuck.reason}; an agent could not set it up in {TRIES} tries ({problem})")

    async def _converse(self, stuck: Stuck, sandbox: OutwardSandbox, problem: str, allow: Sequence[str]) -> None:
        """One conversation. How it ended does not matter, only what it left."""
        draft = stuck.draft
        instruction = (PROMPTS / "set_up.md").read_text()
        task = Task(
            id="set_up",
            folder=draft.folder,
            instruction=instruction.format(
                name=draft.name,
                reason=stuck.reason,
                roots=" and ".join("the root" if root == "." else f"{root}/" for root in draft.import_roots),
                allowed=", ".join(allow) or "nothing",
                problem=problem,
            ),
            tree=draft.tree,
            hidden_tests=draft.tree,
            test_files=(),
            fail_to_pass=(),
            pass_to_pass=(),
            tools=TOOLS,
            origin=draft.name,
        )
        chat = byte_chat()
        client = Client(self.url, self.name, timeout_s=600.0, max_retries=5)
        engine = RemoteEngine(client, encode=chat.encode, end_id=chat.end_id, render_call=render_call)
        try:
            harness = Harness(LIMITS, tools_in_api=True)
            await run_agent(task, sandbox, engine.open("set_up"), chat, harness, "set_up", draft.name)
        except ModelLost as error:
            raise Unprepared(f"{stuck.reason}; no agent could set it up: {error}") from error
        finally:
            await engine.aclose()


async def _verified(stuck: Stuck, sandbox: OutwardSandbox) -> Repository:
    """The repository with the packages of the sandbox, in sandboxes without a network."""
    folder = stuck.draft.folder
    deps = folder / "deps"
    start = ""
    with suppress(OSError):
        start = (await sandbox.read(".setup/start.sh")).strip()
    shutil.rmtree(deps)
    shutil.rmtree(folder / "modules", ignore_errors=True)
    shutil.copytree(folder / "deps.before", deps)
    with tempfile.TemporaryDirectory(prefix="offbook-packages-") as place:
        packages = Path(place, "packages")
        await sandbox.copy_out(".setup/packages", packages)
        keep_modules(packages, folder / "modules")
        shutil.copytree(packages, deps, dirs_exist_ok=True)
    settle(stuck.project, deps)
    repository = await stuck.finished(replace(stuck.draft, start=start or stuck.draft.start))
    passing = len(repository.tests) / (len(repository.tests) + len(repository.excluded))
    if passing < PASSING:
        example = next(iter(repository.excluded.items()))
        raise Unprepared(f"{passing:.0%} of the tests can be relied on, for example not {': '.join(example)}")
    return repository


def keep_modules(packages: Path, into: Path) -> None:
    """Keep modules that the agent wrote itself: images of the tasks have it from no index."""
    installed = metadata.distributions(path=[str(packages)])
    listed = {str(file) for distribution in installed for file in distribution.files or []}
    for path in packages.rglob("*.py"):
        name = path.relative_to(packages).as_posix()
        if name not in listed and not name.startswith("bin/"):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, into / name)


def _variables(repository: Repository, indexes: Sequence[str]) -> dict[str, str]:
    """So that what is installed goes to the folder that is kept, and is found there."""
    roots = [os.path.normpath(f"/app/{root}") for root in repository.import_roots]
    variables = {"PYTHONPATH": os.pathsep.join([PACKAGES, *roots, "/opt/pip"]), "PIP_TARGET": PACKAGES}
    variables |= dict.fromkeys(("PIP_UPGRADE", "PIP_NO_COMPILE", "PIP_NO_CACHE_DIR", "PIP_NO_INPUT"), "1")
    if indexes:
        variables |= {"PIP_INDEX_URL": indexes[0], "PIP_EXTRA_INDEX_URL": " ".join(indexes[1:])}
    return variables
