"""A sandbox of namespaces, made by bubblewrap for every command: own files, processes, network, users, limits.

Nothing is mounted on the host and nothing runs between commands. A sandbox is a stack of folders (layers.py), so a fork
costs a few folders whatever the tree's size. docs/sandbox.md says what is isolated and what is not.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

from offbook.sandbox.bwrap.arguments import (
    HOME,
    POINTS,
    PYTHON,
    TEMPORARY,
    TREE,
    View,
    sandbox_arguments,
    seccomp_file,
    view_arguments,
)
from offbook.sandbox.bwrap.isolation import (
    ControlGroup,
    control_groups,
    give_back_user,
    isolation,
    make_group,
    require_isolation,
    rlimits,
    take_user,
)
from offbook.sandbox.bwrap.launch import COMMAND_BYTES, KILLED, Launch
from offbook.sandbox.bwrap.layers import Layer, is_owned, merge, next_name, owner_name, store, too_high
from offbook.sandbox.bwrap.merged import Merged
from offbook.sandbox.bwrap.watch import can_watch
from offbook.sandbox.folders import bytes_in, deleted_bytes, in_history, publish, refuse_history, remove_tree
from offbook.sandbox.sandbox import HISTORY, Changes, ExecResult, Names, Sandbox, SandboxSpec, environment
from offbook.types import MachineFault

STARTS_S = (0.2, 1.0, 3.0)  # pauses before a command that could not be started is tried again
LOOK_S = 0.1
MIN_FREE = 0.02  # share of a file system that all sandboxes together leave free


class BwrapSandbox(Sandbox):
    """`place` is where the sandbox is stored, for one that survives the process by `snapshot` and `restore`.

    `python` holds an interpreter that the sandbox has in the place of offbook's. `mounts` are read-only folders by
    their paths inside. The tree must not change while it is open. Commands of one sandbox run one after the other.
    """

    python = f"{PYTHON}/bin/python"

    def __init__(
        self,
        tree: Path,
        spec: SandboxSpec | None = None,
        place: Path | None = None,
        python: Path | None = None,
        mounts: Mapping[str, Path] | None = None,
    ):
        require_isolation()
        spec = spec or SandboxSpec()
        seen_as = tuple((point, str(path.resolve())) for point, path in sorted((mounts or {}).items()))
        view = View(str(python.resolve()) if python else "", seen_as)
        view_arguments(view)  # refuses what is no folder
        if not tree.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(tree))
        home = str(place.resolve()) if place else _temporary_place(spec)
        os.makedirs(home)
        base = os.path.realpath(tree)
        try:
            self._begin(
                spec,
                view,
                home,
                base if is_owned(base) else shutil.copytree(base, f"{home}/base", symlinks=True),
                [],
                "",
            )
        except BaseException:
            remove_tree(home)
            raise

    def _begin(
        self, spec: SandboxSpec, view: View, place: str, base: str, frozen: Sequence[Layer], history: str
    ) -> None:
        """On top of `frozen` layers, and with the files that were published in `history`."""
        self.spec = spec
        self._view = view
        self._base = base
        self.place = place
        self.layers: list[Layer] = []  # top first; the first one is written to
        self.group: ControlGroup | None = None
        self._running: Launch | None = None
        self._locks: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}
        self._closed = False
        self._num_kills = 0
        self._full_bytes = 0  # used disk space when a command exceeded the limit
        top = self._new_path("layer")
        self.layers = [Layer.make(top, frozen[0].modes()) if frozen else Layer.make(top), *frozen]
        self._history = self._copied(history)

    @classmethod
    async def restore(cls, place: Path) -> BwrapSandbox:
        """The sandbox that was stored at `place`, as of its last snapshot. Later changes are removed."""
        require_isolation()
        saved = json.loads((place / "sandbox.json").read_text())
        home = str(place.resolve())
        kept = {"sandbox.json", "base", saved["history"], *map(os.path.basename, saved["layers"])}
        for name in os.listdir(home):
            if name not in kept:
                await asyncio.to_thread(remove_tree, f"{home}/{name}")
        sandbox = cls.__new__(cls)
        view = View(saved["python"], tuple(map(tuple, saved["mounts"])))
        layers = [Layer(path) for path in saved["layers"]]
        history = f"{home}/{saved['history']}" if saved["history"] else ""
        sandbox._begin(SandboxSpec(**saved["spec"]), view, home, saved["tree"], layers, history)
        return sandbox

    @property
    def _lock(self) -> asyncio.Lock:
        """Held while layers are mounted or written. A sandbox may outlive an event loop, so there is one per loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._locks:
            self._locks = {loop: asyncio.Lock()}
        return self._locks[loop]

    async def exec(self, command: str, timeout_s: float, report: bool = False) -> ExecResult:
        self._refuse_if_closed()
        if len(command.encode(errors="replace")) > COMMAND_BYTES or "\0" in command:
            return ExecResult(126, "the command is too long, or has a null byte in it\n", False, False)
        try:
            os.fsencode(command)
        except UnicodeEncodeError:  # lone surrogates
            command = command.encode(errors="replace").decode()
        async with self._lock:
            if self._closed:
                return ExecResult(KILLED, "", False, False)
            for pause_s in STARTS_S:
                try:
                    return await self._launch(command, timeout_s, report)
                except (MachineFault, BlockingIOError) as fault:  # nothing ran: another sandbox took all processes
                    if "temporarily unavailable" not in str(fault):
                        raise
                    await asyncio.sleep(pause_s)
            return await self._launch(command, timeout_s, report)

    async def _launch(self, command: str, timeout_s: float, report: bool) -> ExecResult:
        if self.group is None and (groups := control_groups()):
            self.group = make_group(groups, f"{owner_name(os.getpid())}-{next_name()}", self.spec)
        group = self.group
        used = await asyncio.to_thread(self._disk_bytes)  # a short command may have filled the sandbox unnoticed
        self._full_bytes = used if used > self.spec.disk_mb << 20 else 0
        if self._closed:
            return ExecResult(KILLED, "", False, False)
        self.layers[0].keep_open()
        limits = rlimits(self.spec, bool(self._full_bytes))
        launch = Launch(limits, group.entrance if group else "", self.spec.watch and can_watch())
        self._running = launch
        user = take_user() if isolation().own_user else None
        filter_end = os.open(seccomp_file(store(), inotify=user is not None), os.O_RDONLY | os.O_CLOEXEC)
        arguments = sandbox_arguments(self._base, self.layers, self.place, self._history, self._view, filter_end, user)
        inherited = [filter_end] if user is None else [filter_end, user]
        watching = asyncio.create_task(self._watch_limits(launch))
        try:
            result = await launch.run(
                arguments, inherited, environment(PYTHON, HOME, TEMPORARY), command, timeout_s, report
            )
            if watching.done():
                watching.result()
        finally:
            os.close(filter_end)
            if user is not None:
                give_back_user(user)
            watching.cancel()
            self._running = None
        before = self._num_kills
        self._num_kills = group.num_memory_kills() if group else 0
        if self._num_kills > before and result.exit_code and not result.exhausted:
            result = replace(result, exhausted="memory")
        return result

    async def _watch_limits(self, launch: Launch) -> None:
        """Kill a launch that exceeds a limit which the kernel does not enforce: of the disk, and of processes without a
        control group, because RLIMIT_NPROC does not bound root's."""
        counts = self.group is None and isolation().is_root
        try:
            while not launch.exhausted:
                await asyncio.sleep(LOOK_S)
                if counts and len(launch.pids()) > self.spec.pids:
                    launch.exhausted = "processes"
                    return
                used = await asyncio.to_thread(self._disk_bytes, launch)
                if used > self._disk_limit() or _is_nearly_full(self.place):
                    launch.exhausted = "disk"
                    self._full_bytes = used
        finally:
            launch.kill()  # also if watching failed: nothing runs unwatched

    def _disk_limit(self) -> int:
        return max(self.spec.disk_mb << 20, self._full_bytes)

    def _disk_bytes(self, launch: Launch | None = None) -> int:
        top, *frozen = self.layers
        used = bytes_in(top.path) + sum(layer.bytes_frozen() for layer in frozen)
        return used + (deleted_bytes(launch.pids(), tuple(POINTS.values())) if launch else 0)

    async def read(self, path: str) -> str:
        return self._files(path).read(path).decode(errors="replace")

    async def list(self, path: str) -> Names:
        return self._files(path).names(path)

    async def files(self) -> Names:
        return sorted("/".join(parts) for parts in self._merged().files())

    async def changes(self) -> Changes:
        return await asyncio.to_thread(self._merged().changes, Merged([self._base], TREE))

    async def copy_out(self, path: str, into: Path) -> None:
        """Copy the regular files below a folder of the tree, of any size, to a new folder; no links."""
        await asyncio.to_thread(self._merged().copy_out, path, into)

    async def write(self, path: str, text: str) -> None:
        refuse_history(path)
        content = text.encode(errors="replace")
        async with self._lock:
            if self._disk_bytes() + len(content) > self._disk_limit():
                raise OSError(errno.EDQUOT, f"the sandbox is full: {self.spec.disk_mb} MB may be written", path)
            self._merged().write(path, content)

    async def remove(self, path: str) -> None:
        refuse_history(path)
        async with self._lock:
            self._merged().remove(path)

    async def publish(self, name: str, text: str) -> None:
        self._refuse_if_closed()
        folder = self._history or self._new_path("history")
        publish(folder, name, text)
        self._history = folder

    async def fork(self) -> Self:
        self._refuse_if_closed()
        async with self._lock:
            await self._freeze()
            sandbox = type(self).__new__(type(self))
            place = _temporary_place(self.spec)
            frozen = self.layers[1:]
            os.mkdir(place)
            sandbox._begin(self.spec, self._view, place, self._base, frozen, self._history)
            for layer in frozen:
                layer.users += 1
            return sandbox

    async def snapshot(self, note: str = "") -> None:
        """`note` is stored with the snapshot, atomically."""
        self._refuse_if_closed()
        async with self._lock:
            await self._freeze()
            place = self.place
            saved = {
                "tree": self._base,
                "layers": [layer.path for layer in self.layers[1:]],
                "history": os.path.basename(self._history),
                "python": self._view.python,
                "mounts": self._view.mounts,
                "spec": asdict(self.spec),
                "note": note,
            }
            partial = Path(place, f".{next_name()}")
            partial.write_text(json.dumps(saved))
            before = Path(place, "sandbox.json")
            old = json.loads(before.read_text())["history"] if before.exists() else ""
            partial.rename(before)
            if old:
                remove_tree(f"{place}/{old}")
            self._history = self._copied(self._history)

    async def _freeze(self) -> None:
        """Nothing below the top changes from here on. An empty top stays the top."""
        layers = self.layers
        if layers[0].is_empty():
            return
        top = Layer.make(self._new_path("layer"), layers[0].modes())
        if not too_high(layers):
            layers.insert(0, top)
            return
        merged = await asyncio.to_thread(merge, layers, self._new_path("layer"))
        self.layers = [top, merged]
        for layer in layers:
            layer.release()

    async def close(self) -> None:
        self._closed = True
        if self._running is not None:
            self._running.kill()
        async with self._lock:
            await asyncio.to_thread(self._release)

    def _release(self) -> None:
        if self.group is not None:
            self.group.remove()
        for layer in self.layers:
            layer.release()
        self.layers.clear()
        for name in os.listdir(self.place) if os.path.isdir(self.place) else ():
            if not name.startswith("layer-"):  # a fork may still have layers that began here
                path = os.path.join(self.place, name)
                remove_tree(path) if os.path.isdir(path) else os.unlink(path)
        with suppress(OSError):
            os.rmdir(self.place)

    async def leave(self) -> None:
        """Kill what runs and leave the files: `restore` finds the sandbox as of its last snapshot."""
        self._closed = True
        if self._running is not None:
            self._running.kill()
        async with self._lock:
            if self.group is not None:
                self.group.remove()

    def _new_path(self, kind: str) -> str:
        """An earlier process may have taken a number in this folder."""
        while os.path.exists(path := f"{self.place}/{kind}-{next_name()}"):
            pass
        return path

    def _copied(self, history: str) -> str:
        """Published files for this sandbox alone, as links: they are replaced and never changed."""
        return shutil.copytree(history, self._new_path("history"), copy_function=os.link) if history else ""

    def _merged(self) -> Merged:
        self._refuse_if_closed()
        return Merged([*(f"{layer.path}/tree" for layer in self.layers), self._base], TREE)

    def _files(self, path: str) -> Merged:
        if in_history(path):
            return Merged([self._history] if self._history else [], HISTORY)
        return self._merged()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this sandbox is closed")


def _temporary_place(spec: SandboxSpec) -> str:
    """In memory if possible, where files count as memory of the sandbox, and so must leave it some."""
    in_memory = spec.disk_mb * 2 <= spec.memory_mb
    return f"{store(isolation().memory_folder if in_memory else '')}/{next_name()}"


def _is_nearly_full(place: str) -> bool:
    status = os.statvfs(place)
    return status.f_bavail < status.f_blocks * MIN_FREE
