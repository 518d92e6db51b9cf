"""Change two values of a configuration and leave its namesakes, its comments and the rest alone."""

import tomllib
from pathlib import Path

PROMPT = "In settings.toml, set the port of the server to 8443 and turn debug off. Change nothing else."
START = {
    "settings.toml": """\
# Settings of the shop
title = "Shop"
debug = true  # never in production

[server]
host = "127.0.0.1"
port = 8080
workers = 4

[database]
host = "db.internal"
port = 5432
"""
}
SOLUTION = {
    "settings.toml": START["settings.toml"]
    .replace("debug = true", "debug = false")
    .replace("port = 8080", "port = 8443")
}
WRONG = {
    "both ports": {"settings.toml": SOLUTION["settings.toml"].replace("5432", "8443")},
    "loses the rest": {"settings.toml": "debug = false\n[server]\nport = 8443\n"},
    "a string": {"settings.toml": SOLUTION["settings.toml"].replace("8443", '"8443"')},
    "loses the comment": {"settings.toml": SOLUTION["settings.toml"].replace("# Settings of the shop\n", "")},
}


def check(workspace: Path, answer: str) -> str:
    """The values as asked, all others and the title's comment as they were."""
    expected = tomllib.loads(START["settings.toml"])
    expected["debug"], expected["server"]["port"] = False, 8443
    path = workspace / "settings.toml"
    if not path.is_file():
        return "settings.toml is gone"
    content = path.read_text(errors="replace")
    try:
        found = tomllib.loads(content)
    except tomllib.TOMLDecodeError as exc:
        return f"settings.toml is not TOML any more: {exc}"
    if found != expected:
        return f"settings.toml now says {found}"[:160]
    return "" if "# Settings of the shop\n" in content else "a comment is gone from settings.toml"
