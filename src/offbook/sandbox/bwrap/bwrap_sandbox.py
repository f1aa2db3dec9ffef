"""A sandbox of namespaces, made by bubblewrap for every command: own files, processes, network, users, limits.

Nothing is mounted on the host and nothing runs between commands. A sandbox is a stack of folders (layers.py), so a fork
costs a few folders whatever the tree's size. docs/sandbox.md says what is isolated and what is not.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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
from offbook.sandbox.bwrap.layers import Layer, is_owned, next_name, owner_name, refuse_more_layers, store
from offbook.sandbox.bwrap.merged import FolderSandbox, Merged
from offbook.sandbox.bwrap.watch import can_watch
from offbook.sandbox.folders import bytes_in, deleted_bytes, refuse_history, remove_tree
from offbook.sandbox.sandbox import ExecResult, SandboxSpec, environment

LOOK_S = 0.1
MIN_FREE = 0.02  # share of a file system that all sandboxes together leave free


class BwrapSandbox(FolderSandbox):
    """`python` holds an interpreter that the sandbox has in the place of offbook's. `mounts` are read-only folders by
    their paths inside. The tree must not change while it is open. Commands of one sandbox run one after the other.
    """

    python = f"{PYTHON}/bin/python"

    def __init__(
        self,
        tree: Path,
        spec: SandboxSpec | None = None,
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
        base = os.path.realpath(tree)
        self._begin(spec, view, base, [], "")
        if not is_owned(base):
            self._base = shutil.copytree(base, f"{self.place}/base", symlinks=True)

    def _begin(self, spec: SandboxSpec, view: View, base: str, frozen: Sequence[Layer], history: str) -> None:
        """On top of `frozen` layers, and with the files that were published in `history`."""
        self.spec = spec
        self._view = view
        self._base = base
        # In memory if possible, where files count as memory of the sandbox, and so must leave it some.
        in_memory = spec.disk_mb * 2 <= spec.memory_mb
        self.place: str = f"{store(isolation().memory_folder if in_memory else '')}/{next_name()}"
        os.mkdir(self.place)
        self.layers = [self._new_layer(frozen), *frozen]  # top first; the first one is written to
        self.group: ControlGroup | None = None
        self._running: Launch | None = None
        self._lock = asyncio.Lock()  # held while layers are mounted or written
        self._closed = False
        self._num_kills = 0
        self._full_bytes = 0  # used disk space when a command exceeded the limit
        self._history = f"{self.place}/history"
        if history:  # as links: published files are replaced and never changed
            shutil.copytree(history, self._history, copy_function=os.link)
        else:
            os.mkdir(self._history)

    def _new_layer(self, below: Sequence[Layer]) -> Layer:
        path = f"{self.place}/layer-{next_name()}"
        return Layer.make(path, below[0].modes()) if below else Layer.make(path)

    async def exec(self, command: str, timeout_s: float, report: bool = False) -> ExecResult:
        self._refuse_if_closed()
        encoded = command.encode(errors="replace")  # without lone surrogates
        if len(encoded) > COMMAND_BYTES or b"\0" in encoded:
            return ExecResult(126, "the command is too long, or has a null byte in it\n", False, False)
        async with self._lock:
            if self._closed:
                return ExecResult(KILLED, "", False, False)
            return await self._launch(encoded.decode(), timeout_s, report)

    async def _launch(self, command: str, timeout_s: float, report: bool) -> ExecResult:
        if self.group is None and (groups := control_groups()):
            self.group = make_group(groups, f"{owner_name(os.getpid())}-{next_name()}", self.spec)
        group = self.group
        used = await asyncio.to_thread(self._disk_bytes)  # a short command may have filled the sandbox unnoticed
        self._full_bytes = used if used > self.spec.disk_mb << 20 else 0
        if self._closed:
            return ExecResult(KILLED, "", False, False)
        self.layers[0].keep_open()
        user = take_user() if isolation().own_user else None
        filter_end = os.open(seccomp_file(store(), inotify=user is not None), os.O_RDONLY | os.O_CLOEXEC)
        arguments = sandbox_arguments(self._base, self.layers, self.place, self._history, self._view, filter_end, user)
        launch = Launch(
            arguments,
            [filter_end] if user is None else [filter_end, user],
            environment(PYTHON, HOME, TEMPORARY),
            command,
            rlimits(self.spec, bool(self._full_bytes)),
            group.entrance if group else "",
            self.spec.watch and can_watch(),
        )
        self._running = launch
        watching = asyncio.create_task(self._watch_limits(launch))
        try:
            result = await launch.run(timeout_s, report)
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
        counts = self.group is None and os.getuid() == 0
        try:
            while not launch.exhausted:
                await asyncio.sleep(LOOK_S)
                if counts and len(launch.pids()) > self.spec.pids:
                    launch.exhausted = "processes"
                    return
                used = await asyncio.to_thread(self._disk_bytes, launch)
                system = os.statvfs(self.place)
                if used > self._disk_limit() or system.f_bavail < system.f_blocks * MIN_FREE:
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

    async def fork(self) -> Self:
        self._refuse_if_closed()
        async with self._lock:
            if not self.layers[0].is_empty():  # nothing below the top changes from here on
                refuse_more_layers(self.layers)
                self.layers.insert(0, self._new_layer(self.layers))
            sandbox = type(self).__new__(type(self))
            frozen = self.layers[1:]
            sandbox._begin(self.spec, self._view, self._base, frozen, self._history)
            for layer in frozen:
                layer.users += 1
            return sandbox

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
                remove_tree(f"{self.place}/{name}")
        with suppress(OSError):
            os.rmdir(self.place)

    def _merged(self) -> Merged:
        self._refuse_if_closed()
        return Merged([*(f"{layer.path}/tree" for layer in self.layers), self._base], TREE)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this sandbox is closed")
