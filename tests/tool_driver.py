"""Run tool calls of agent.py one after the other, with the sandbox of this machine, as whatever user starts this.

    python tool_driver.py WORKSPACE < steps.json

Steps are a JSON list of [tool, arguments]; the answer is one JSON line per step: content, is_error, seconds; before
them a line that says how commands are confined, after them one with the memory and the longest pause of the loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import agent


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def measure_pauses(longest: list[float]) -> None:
    """Note the longest time in which the event loop did not come round to us."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.01)
        longest[0] = max(longest[0], time.monotonic() - before - 0.01)


async def drive(workspace: Path, steps: list[tuple[str, dict[str, Any]]]) -> None:
    config = agent.load_config({}, os.environ, workspace)
    opened, jobs, sandbox, notes = agent.confine(config)
    say(level=sandbox and sandbox.level, notes=notes, uid=os.getuid())
    context = agent.ToolContext(config, opened, sandbox, asyncio.Event(), jobs=jobs)
    longest = [0.0]
    meter = asyncio.ensure_future(measure_pauses(longest))
    for name, arguments in steps:
        began = time.monotonic()
        try:
            result = await agent.find_tool(name).run(context, arguments)
        except agent.ToolError as exc:
            result = agent.ToolResult(str(exc), is_error=True)
        content = agent.hide_secrets(result.content, context.secrets())
        say(content=content, is_error=result.is_error, seconds=time.monotonic() - began)
    await jobs.close()
    meter.cancel()
    # not ru_maxrss: that one is inherited from the process that started us
    peak = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    say(rss_kb=int(peak[1]) if peak else 0, longest_pause=longest[0])


if __name__ == "__main__":
    asyncio.run(drive(Path(os.path.realpath(sys.argv[1])), json.load(sys.stdin)))
