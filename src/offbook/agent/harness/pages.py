"""Documentation search: a tool over fixed pages outside of sandboxes, the same for every rollout.

Rollouts and evaluations have it as the tool `search_docs`, agents behind `offbook serve` and in `harness.command`
as `POST /tools/search_docs`. Answers depend on the pages and the query alone. `version` is a digest of all pages; it is
in the run folder, and a run resumes only with the same pages.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from offbook.agent.harness.search import search_texts
from offbook.agent.harness.tool import Tool, ToolFailed, Workbench, tool_of
from offbook.types import OffbookError

NAME = "search_docs"
KINDS = (".md", ".rst", ".txt", ".html")
MOST_BYTES = 64 << 20


class Pages:
    def __init__(self, folders: Sequence[str]):
        found = {}
        for folder in map(Path, folders):
            if not folder.is_dir():
                raise OffbookError(f"there is no folder {folder} for tools.pages")
            for path in sorted(path for path in folder.rglob("*") if path.suffix in KINDS and path.is_file()):
                found[path.relative_to(folder).as_posix()] = path.read_bytes()
        if not found:
            raise OffbookError(f"there are no pages ({', '.join(KINDS)}) in {', '.join(folders)}")
        if (size := sum(map(len, found.values()))) > MOST_BYTES:
            raise OffbookError(f"the pages of tools.pages have {size} bytes, and {MOST_BYTES} are the most")
        digests = [(name, hashlib.sha256(data).hexdigest()) for name, data in sorted(found.items())]
        self.version = hashlib.sha256(repr(digests).encode()).hexdigest()
        self.texts = {name: data.decode(errors="replace") for name, data in sorted(found.items())}

    async def search(self, query: str) -> str:
        return await asyncio.to_thread(search_texts, query, self.texts)

    async def answer(self, query: str) -> str:
        """The same for agents behind an endpoint."""
        try:
            return await self.search(query)
        except ToolFailed as error:
            raise OffbookError(str(error)) from None

    def tool(self) -> Tool:
        async def search_docs(bench: Workbench, query: Annotated[str, "what to look for, in a few words"]) -> str:
            """Search the documentation: the pages that say most of some words, and their telling lines."""
            return await self.search(query)

        return replace(tool_of(search_docs), name=NAME, own_name=NAME)
