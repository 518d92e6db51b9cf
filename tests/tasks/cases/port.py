"""Change one value of a YAML file."""

from pathlib import Path

PROMPT = "Set the port in server.yaml to 9090. Everything else in there stays as it is, please."
START = {
    "server.yaml": """\
# how the service is started
server:
  host: 0.0.0.0
  port: 8080  # behind the proxy
metrics:
  enabled: true
  interval: 8080
""",
    "README.md": "The service listens on the port in server.yaml.\n",
}
SOLUTION = {"server.yaml": START["server.yaml"].replace("port: 8080", "port: 9090")}
WRONG = {
    "both numbers": {"server.yaml": START["server.yaml"].replace("8080", "9090")},
    "loses the rest": {"server.yaml": "server:\n  port: 9090\n"},
}


def check(workspace: Path, answer: str) -> str:
    """That line alone differs; comments and blank lines are not judged."""

    def settings(text: str) -> list[str]:
        return [line for each in text.split("\n") if (line := each.partition("#")[0].rstrip())]

    path = workspace / "server.yaml"
    text = path.read_text(errors="replace") if path.is_file() else ""
    return "" if settings(text) == settings(SOLUTION["server.yaml"]) else f"server.yaml holds {text[:120]!r}"
