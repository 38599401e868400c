"""`fathom cluster`: what a running service says of its processes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

from orchestrator.commands.errors import UsageError

_TIMEOUT = 15.0
_WIDE = 200  # columns, where the output is no terminal


def status(url: str, api_key_file: Path | None, as_json: bool) -> int:
    """Print the state of a service; the exit status is 1 where it cannot work."""
    found = _ask("GET", f"{url.rstrip('/')}/cluster/status", api_key_file)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    return 1 if found.get("trouble") else 0


def drain(worker: str, url: str, api_key_file: Path | None) -> int:
    """Ask for a worker to leave and say who takes over."""
    found = _ask("POST", f"{url.rstrip('/')}/cluster/drain?worker={quote(worker)}", api_key_file)
    successor = found["successor"]
    again = "starts anew" if successor == worker else f"leaves; {successor} takes over"
    print(f"{worker} {again}")
    return 0


def _ask(method: str, url: str, api_key_file: Path | None) -> dict[str, Any]:
    from orchestrator.commands.serve import read_keys

    request = urllib.request.Request(url, method=method)
    for key in read_keys(api_key_file)[:1]:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            words = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            words = text[:200]
        hint = "; is it started with --cluster?" if error.code == 404 and "worker" not in words else ""
        raise UsageError(f"{url}: {error.code}: {words}{hint}", code=1) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UsageError(f"{url}: no answer ({reason}); give the service's address with --url", code=1) from None


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "state", "life", "pid", "node"):
        table.add_column(name, no_wrap=True)
    for name in ("holds", "steps", "owes s", "MiB", "since s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("last end", no_wrap=True)
    for each in found["workers"]:
        table.add_row(
            *(str(each[name]) for name in ("name", "state", "life", "pid", "node", "held", "steps")),
            f"{each['waiting']:.1f}",
            f"{each['memory'] / 2**20:.0f}",
            f"{each['since']:.0f}",
            each["last_exit"],
        )
    console.print(table)
    entry = found.get("entry", {})
    outcomes = ", ".join(f"{count} {name}" for name, count in entry.get("outcomes", {}).items()) or "none ended"
    console.print(f"requests: {entry.get('live', 0)} open, {outcomes}", highlight=False)
    for each in found["recoveries"][-5:]:
        took = f"up again after {each['up'] - each['noticed']:.1f} s" if each["up"] else "not up yet"
        console.print(f"{each['name']}: {each['why']}; life {each['life']} {took}", highlight=False)
    if found.get("trouble"):
        console.print(f"The service cannot work: {found['trouble']}", highlight=False)
