"""The floors: the least that a program in Python has to do for each figure. `python floors.py NAME ARGUMENTS`.

Each is as short as it can be and does nothing for a user; what agent.py takes above it is what its features cost.
"""

from __future__ import annotations

import sys


def sdk(base_url: str) -> None:
    """Import the SDK, ask once, print the answer."""
    import openai

    client = openai.OpenAI(base_url=base_url, api_key="none")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    messages = [{"role": "user", "content": "hi"}]
    for chunk in client.chat.completions.create(model="m", messages=messages, tools=tools, stream=True):
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="")


def raw_post(client, messages: list[dict], tools: bool = True):  # type: ignore[no-untyped-def]
    """One request through the SDK's low-level post; returns the response with its head read."""
    import json

    import httpx2
    from openai import Stream

    body = {"model": "m", "messages": messages, "stream": True}
    if tools:
        body["tools"] = [{"type": "function", "function": {"name": "run_shell_command", "parameters": {}}}]
    headers = {"X-Stainless-Raw-Response": "stream", "Content-Type": "application/json"}
    return client.post(
        "/chat/completions", content=json.dumps(body).encode(), cast_to=httpx2.Response, stream=True,
        stream_cls=Stream, options={"headers": headers},
    )  # fmt: skip


def raw_deltas(response):  # type: ignore[no-untyped-def]
    """The deltas of a streamed response."""
    import json

    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["delta"]


def warm(base_url: str) -> None:
    """Be ready, then ask once for each line of standard input."""
    import openai

    client = openai.OpenAI(base_url=base_url, api_key="none")
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in raw_deltas(raw_post(client, [{"role": "user", "content": line}])):
            pass


def loop(base_url: str) -> None:
    """The smallest agent: run what the model asks for until it asks for nothing."""
    import json
    import subprocess

    import openai

    client = openai.OpenAI(base_url=base_url, api_key="none")
    messages = [{"role": "system", "content": "x" * 2000}, {"role": "user", "content": "go"}]
    while True:
        call = next((d["tool_calls"][0] for d in raw_deltas(raw_post(client, messages)) if d.get("tool_calls")), None)
        if call is None:
            break
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        result = f"{done.stdout}{done.stderr}[exit code {done.returncode}]"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def stream(base_url: str) -> None:
    """Ask once and print the answer as it comes."""
    import openai

    client = openai.OpenAI(base_url=base_url, api_key="none")
    for delta in raw_deltas(raw_post(client, [{"role": "user", "content": "go"}])):
        sys.stdout.write(delta.get("content") or "")
    sys.stdout.flush()


def prompt() -> None:
    """A bare editor."""
    import prompt_toolkit

    prompt_toolkit.prompt("> ")


def stream_on_enter(base_url: str) -> None:
    """Be ready, then print one answer for each line typed."""
    import openai

    client = openai.OpenAI(base_url=base_url, api_key="none")
    while True:
        sys.stdout.write("> ")
        sys.stdout.flush()
        if not sys.stdin.readline():
            return
        for delta in raw_deltas(raw_post(client, [{"role": "user", "content": "go"}])):
            sys.stdout.write(delta.get("content") or "")
            sys.stdout.flush()
        sys.stdout.write("\n")


def imports() -> None:
    """Import what agent.py depends on and print the resident memory in kB."""
    import openai
    import prompt_toolkit
    import rich.console

    del openai, prompt_toolkit, rich
    with open("/proc/self/status") as file:
        print(next(line.split()[1] for line in file if line.startswith("VmRSS")))


def bwrap(times: str) -> None:
    """Run `true` in bubblewrap so many times and print the median in seconds."""
    import statistics
    import subprocess
    import time

    box = "bwrap --die-with-parent --new-session --unshare-user --unshare-pid --unshare-ipc --unshare-uts --unshare-net"
    box += " --ro-bind / / --dev /dev --proc /proc --tmpfs /tmp --cap-drop ALL -- bash -c true"
    taken = []
    for _ in range(int(times)):
        started = time.perf_counter()
        subprocess.run(box.split(), check=True)
        taken.append(time.perf_counter() - started)
    print(statistics.median(taken))


def read_json(path: str) -> None:
    """Read a file of JSON lines and print how long that took in seconds."""
    import json
    import time

    started = time.perf_counter()
    with open(path, "rb") as file:
        records = [json.loads(line) for line in file]
    print(time.perf_counter() - started)
    del records


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
