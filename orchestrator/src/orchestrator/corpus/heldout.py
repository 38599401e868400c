"""Texts that no model of this project is trained on, the same on every machine with Python.

They come out of the installed standard library, so that anybody can measure on them without a download. Modules change
a little between patch releases: `differences` says which texts are not those the published figures were taken on.

The bundled tokenizers were made from the standard library as a whole, these modules included.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from orchestrator.corpus.document import clean, order_key
from orchestrator.corpus.stdlib import stdlib_root, topics

MODULES = (
    "argparse.py",
    "asyncio/queues.py",
    "bisect.py",
    "calendar.py",
    "configparser.py",
    "csv.py",
    "difflib.py",
    "doctest.py",
    "fractions.py",
    "heapq.py",
    "http/cookiejar.py",
    "ipaddress.py",
    "json/encoder.py",
    "mailbox.py",
    "queue.py",
    "sched.py",
    "shutil.py",
    "statistics.py",
    "textwrap.py",
)
LONG = ("argparse.py", "difflib.py", "doctest.py", "http/cookiejar.py", "ipaddress.py", "mailbox.py")
"""Modules of more than 17,000 tokens of v41-mini each, for measuring at long contexts."""

_RECORD = Path(__file__).parent / "heldout.json"
_TOPIC_SHARE = 0.2


def is_heldout_topic(name: str) -> bool:
    """Whether a help topic is held out: one in five, by the digest of its name."""
    return order_key(0, name)[0] < 256 * _TOPIC_SHARE


def heldout_texts(root: Path | None = None) -> list[tuple[str, str]]:
    """Names and texts: modules first ("python/argparse.py"), then topics ("topic/for"), each in order of name.

    Raises FileNotFoundError if the Python here has no sources of a module. Topics that it lacks are left out.
    """
    root = root or stdlib_root()
    texts = []
    for name in MODULES:
        path = root / name
        if not path.is_file():
            raise FileNotFoundError(f"{path}: not found; held-out texts need a Python with the sources of its library")
        texts.append((f"python/{name}", clean(path.read_bytes()) or ""))
    return texts + [(f"topic/{name}", text) for name, text in topics().items() if is_heldout_topic(name)]


def digests(texts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """SHA-256 of each text by name."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts}


def differences(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Names that are missing, additional or not of the text recorded from Python 3.11.7, in order."""
    recorded, here = json.loads(_RECORD.read_text(encoding="utf-8"))["sha256"], digests(texts)
    return sorted(name for name in recorded.keys() | here.keys() if recorded.get(name) != here.get(name))
