"""Set-up by agents, for a repository that does not get ready by itself.

One agent reads the repository and proposes ten commands with what they print: how one would see that it works. A second
gets three of them as targets, in a sandbox with a way out to the package index, and installs and mocks until they hold
in a sandbox that has none, and the tests can be relied on. It has five tries, each with the problem of the last
one.

Of its work two things are kept: the packages and modules in .setup/packages, which go to deps/, and .setup/start.sh,
which is run in every sandbox of the repository. Left out: services that outlive a command, compilers, system packages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import tempfile
import urllib.parse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from offbook.agent.chat import byte_chat, render_call
from offbook.agent.harness import Harness, run_agent
from offbook.core.client import Client
from offbook.core.runfolder import write_atomic
from offbook.engine.remote import RemoteEngine
from offbook.sandbox import Sandbox, SandboxSpec, open_sandbox
from offbook.sandbox.egress import DOOR, SOCKET, EgressProxy, OutwardSandbox, entry
from offbook.tasks.factory.instruction.instruct import PROMPTS
from offbook.tasks.factory.prepare.dependencies import LIMIT_MB, settle
from offbook.tasks.factory.prepare.prepare import Progress, Stuck
from offbook.tasks.factory.prepare.source import file_urls, pip_settings, run_quietly, without_secrets
from offbook.tasks.factory.types import Repository, Unprepared
from offbook.tasks.suite import suite_sandbox
from offbook.types import STRICT, Limits, MachineFault, ModelLost, OffbookError, Task

NUM_CHECKS = 10
NUM_TARGETS = 3
TRIES = 5
CHECK_S = 120.0
COMPILE_S = 300.0
ANSWER_CHARS = 1500  # of what a failing check printed
# Tokens are bytes here: a model's own are not known.
LIMITS = Limits(turns=60, tokens=4_000_000, context=600_000, message_tokens=8192, command_s=600.0, wall_s=3600.0)
TOOLS = ("read_file", "edit_file", "list_dir", "search_codebase", "run_command", "finish")
AGAIN = "What was wrong after your last try, of which all files are still there:"


@dataclass(frozen=True)
class Check:
    __pydantic_config__ = STRICT

    command: str
    expect: str

    def __str__(self) -> str:
        return f"{self.command}\n  -> {self.expect}"


_CHECKS = TypeAdapter(list[Check])


@dataclass(frozen=True)
class SetUpAgents:
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
        chat = byte_chat()
        engine = RemoteEngine(
            Client(self.url, self.name, timeout_s=600.0, max_retries=5),
            encode=chat.encode,
            end_id=chat.end_id,
            render_call=render_call,
        )
        try:
            with tempfile.TemporaryDirectory(prefix="offbook-door-") as door:
                work = _Work(stuck, spec, progress, engine, Path(door), self.allow)
                checks = await work.propose()
                return await work.set_up(checks)
        except ModelLost as error:
            raise Unprepared(f"{stuck.reason}; no agent could set it up: {error}") from error
        finally:
            await engine.aclose()


@dataclass(frozen=True)
class _Work:
    stuck: Stuck
    spec: SandboxSpec
    progress: Progress
    engine: RemoteEngine
    door: Path
    allow: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.stuck.draft.folder

    async def propose(self) -> list[Check]:
        """By an agent that has no network. Those that do not hold now come first: they tell something."""
        name = self.stuck.draft.name
        problem = ""
        self.progress(f"{name}: an agent proposes how one would see that it works")
        async with await open_sandbox(self.stuck.draft.tree, self.spec, python=self.folder) as sandbox:
            for _ in range(TRIES):
                await self._agent(sandbox, "checks", problem=problem, count=NUM_CHECKS)
                try:
                    checks = _CHECKS.validate_json(await sandbox.read(".setup/checks.json"))
                    checks = [one for one in dict.fromkeys(checks) if one.command.strip() and one.expect.strip()]
                    if len(checks) >= NUM_TARGETS:
                        break
                    problem = f"There are only {len(checks)} checks in .setup/checks.json."
                except (OSError, ValueError, ValidationError) as error:
                    problem = f"There is no such list in .setup/checks.json yet: {str(error).splitlines()[0]}."
            else:
                raise Unprepared(f"{self.stuck.reason}; no agent could say how one would see that it works ({problem})")
        bad = await failing(self.stuck.draft, checks[:NUM_CHECKS], self.spec)
        return sorted(checks[:NUM_CHECKS], key=lambda check: check not in bad)

    async def set_up(self, checks: Sequence[Check]) -> Repository:
        targets = checks[:NUM_TARGETS]
        record = {"reason": self.stuck.reason, "checks": [asdict(one) for one in checks], "targets": NUM_TARGETS}
        settings = await pip_settings()
        indexes = [without_secrets(url) for url in settings.indexes if url.startswith("http")]
        allow = (*dict.fromkeys(hosts_of([*indexes, *await file_urls()])), *self.allow)
        problems: list[str] = []
        certificates = f"{DOOR}/certificates.pem" if settings.certificates else ""  # as the sandbox sees them
        if certificates:
            shutil.copyfile(settings.certificates, self.door / "certificates.pem")
        keep_before(self.folder)
        async with (
            EgressProxy(self.door / SOCKET, allow) as proxy,
            OutwardSandbox(
                self.stuck.draft.tree,
                replace(self.spec, disk_mb=LIMIT_MB),
                self.door,
                variables(self.stuck.draft, indexes, certificates),
                python=self.folder,
                mounts={"/opt/pip/pip": _own_pip()},
            ) as sandbox,
        ):
            for number in range(1, TRIES + 1):
                self.progress(f"{self.stuck.draft.name}: an agent sets it up, try {number} of {TRIES}")
                again = "".join(f"{AGAIN}\n\n{problem}" for problem in problems[-1:])
                asked = {"targets": "\n".join(map(str, targets)), "allowed": ", ".join(allow) or "nothing"}
                await self._agent(sandbox, "set_up", problem=again, **asked)
                try:
                    repository = await self._tried(sandbox, targets)
                    break
                except (Unprepared, MachineFault) as error:
                    problems.append(str(error))
            else:
                why = problems[-1].partition("\n")[0]
                raise Unprepared(f"{self.stuck.reason}; an agent could not set it up in {TRIES} tries ({why})")
            refused = sorted({event.detail for event in proxy.events})
        held = len(checks) - len(await failing(repository, checks, self.spec))
        record |= {"tries": problems, "start": repository.start, "refused": refused, "held": held}
        write_atomic(self.folder / "set_up.json", json.dumps(record, indent=1))
        shutil.rmtree(self.folder / "deps.before")
        return repository

    async def _agent(self, sandbox: Sandbox, words: str, **more: object) -> None:
        """One conversation. How it ended does not matter, only what it left."""
        draft = self.stuck.draft
        roots = " and ".join("the root" if root == "." else f"{root}/" for root in draft.import_roots)
        about = {"name": draft.name, "reason": self.stuck.reason, "roots": roots, **more}
        instruction = (PROMPTS / f"{words}.md").read_text().format(**about)
        task = Task(words, self.folder, instruction, draft.tree, draft.tree, (), (), (), TOOLS, draft.name)
        session = self.engine.open(words)
        await run_agent(task, sandbox, session, byte_chat(), Harness(LIMITS, tools_in_api=True), words, draft.name)

    async def _tried(self, sandbox: OutwardSandbox, targets: Sequence[Check]) -> Repository:
        """The repository with the packages of the sandbox, in sandboxes without a network."""
        try:
            start = (await sandbox.read(".setup/start.sh")).strip()
        except OSError:
            start = ""
        keep_before(self.folder)
        with tempfile.TemporaryDirectory(prefix="offbook-packages-") as place:
            packages = Path(place, "packages")
            await sandbox.copy_out(".setup/packages", packages)
            shutil.rmtree(self.folder / "modules", ignore_errors=True)
            keep_modules(packages, self.folder / "modules")
            lay_over(packages, self.folder / "deps")
        settle(self.stuck.project, self.folder / "deps")
        # Not by the repository's own interpreter, which would run what the agent put there.
        python = os.path.realpath(self.folder / "python" / "bin" / "python")
        await run_quietly([python, "-I", "-S", "-m", "compileall", "-q", str(self.folder / "deps")], COMPILE_S)
        repository = replace(self.stuck.draft, start=start or self.stuck.draft.start)
        bad = await failing(repository, targets, self.spec)
        if bad:
            raise Unprepared("\n\n".join(f"{check}\nfailed:\n{output}" for check, output in bad.items()))
        return await self.stuck.finished(repository)


async def failing(repository: Repository, checks: Sequence[Check], spec: SandboxSpec) -> dict[Check, str]:
    """The checks that do not hold in a sandbox without a network, with what they printed."""
    bad = {}
    roots = os.pathsep.join(repository.import_roots)
    async with await suite_sandbox(repository.tree, repository.suite, spec) as sandbox:
        for check in checks:
            command = shlex.join(["env", f"PYTHONPATH={roots}", "sh", "-c", check.command])
            result = await sandbox.exec(command, CHECK_S)
            shown = " ".join(check.expect.split()) in " ".join(result.output.split())
            if result.timed_out:
                bad[check] = f"it took longer than {CHECK_S:.0f} s"
            elif result.exit_code or not shown:
                bad[check] = f"exit code {result.exit_code}\n{result.output[-ANSWER_CHARS:]}"
    return bad


def hosts_of(urls: Sequence[str]) -> list[str]:
    """As the proxy lets them through."""
    places = [urllib.parse.urlsplit(url) for url in urls]
    return [f"{place.hostname}:{place.port}" if place.port else str(place.hostname) for place in places]


def variables(repository: Repository, indexes: Sequence[str], certificates: str) -> dict[str, str]:
    """So that what is installed goes to the folder that is kept, and is found there."""
    roots = [os.path.normpath(f"/app/{root}") for root in repository.import_roots]
    more = {"PIP_CERT": certificates, "SSL_CERT_FILE": certificates} if certificates else {}
    if indexes:
        more |= {"PIP_INDEX_URL": indexes[0], "PIP_EXTRA_INDEX_URL": " ".join(indexes[1:])}
        more["PIP_TRUSTED_HOST"] = " ".join(hosts_of([url for url in indexes if url.startswith("http://")]))
    return {
        "PYTHONPATH": os.pathsep.join(["/app/.setup/packages", *roots, "/opt/pip"]),
        "PIP_TARGET": "/app/.setup/packages",
        **dict.fromkeys(("PIP_UPGRADE", "PIP_NO_COMPILE", "PIP_NO_CACHE_DIR", "PIP_NO_INPUT"), "1"),
        **{name: value for name, value in more.items() if value},
    }


def _own_pip() -> Path:
    found = importlib.util.find_spec("pip")
    if found is None or found.origin is None:
        raise OffbookError("pip is not installed in offbook's environment, and agents need it to set a repository up")
    return Path(found.origin).parent


def keep_before(folder: Path) -> None:
    """deps/ becomes what it was before any agent, which stays in deps.before/."""
    before = folder / "deps.before"
    deps = folder / "deps"
    if not before.is_dir():
        deps.rename(before)
    shutil.rmtree(deps, ignore_errors=True)
    shutil.copytree(before, deps, symlinks=True, copy_function=os.link)


def keep_modules(packages: Path, into: Path) -> None:
    """Keep modules that the agent wrote itself: images of the tasks have it from no index."""
    installed = metadata.distributions(path=[str(packages)])
    listed = {packages / file for distribution in installed for file in distribution.files or []}
    for path in packages.rglob("*.py"):
        if path.is_file() and path not in listed and path.relative_to(packages).parts[0] != "bin":
            target = into / path.relative_to(packages)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def lay_over(packages: Path, deps: Path) -> None:
    """The files of one folder in the place of another's, whose own are links and must not be written to."""

    def move(source: str, target: str) -> None:
        Path(target).unlink(missing_ok=True)
        shutil.move(source, target)

    shutil.copytree(packages, deps, copy_function=move, dirs_exist_ok=True)
