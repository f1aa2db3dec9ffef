"""An agent of one's own, to be trained by offbook: a chat client, four tools, and no dependency.

    offbook train @ examples/own_agent/agent.toml --out runs/own

offbook runs it once per rollout, in a sandbox, in the task's tree. It finds the request in OFFBOOK_INSTRUCTION and the
model at OPENAI_BASE_URL. Every message from there is recorded with its token ids; when the process ends, the tree is
graded.
"""

import json
import os
import re
import subprocess
import urllib.request
from pathlib import Path

TURNS = 5
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def complete(messages: list[dict[str, str]]) -> str:
    """Ask the model for the next message."""
    body = json.dumps({"model": os.environ["OFFBOOK_MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def run_tool(name: str, arguments: dict[str, str]) -> str:
    """Run one of the tools that system.txt describes."""
    if name == "read_file":
        return Path(arguments["path"]).read_text()
    if name == "edit_file":
        file = Path(arguments["path"])
        text = file.read_text()
        if arguments["old"] not in text:
            return "error: old is not in " + str(file)
        file.write_text(text.replace(arguments["old"], arguments["new"], 1))
        return "edited " + str(file)
    if name == "run_command":
        done = subprocess.run(arguments["command"], shell=True, capture_output=True, text=True)
        return done.stdout + done.stderr
    return f"error: there is no tool {name}"


def main() -> None:
    system = (Path(__file__).parent / "system.txt").read_text().rstrip("\n")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": os.environ["OFFBOOK_INSTRUCTION"]}]
    for _ in range(TURNS):
        message = complete(messages)
        messages.append({"role": "assistant", "content": message})
        try:
            call = json.loads(CALL.search(message)[1])
            if call["name"] == "finish":
                return
            answer = run_tool(call["name"], call["arguments"])
        except (TypeError, KeyError, ValueError, OSError) as error:  # no call, or one that cannot be read
            answer = f"error: {type(error).__name__}: {error}"
        messages.append({"role": "tool", "content": answer})


if __name__ == "__main__":
    main()
