"""The page of the figures: tables and sentences from the results, between two comments each:

    <!-- figures: NAME -->
    ...
    <!-- figures: end -->

Text outside of the comments is left alone. A page that is not there is made, with every study.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.simulate.figures import page_capacity, page_findings, page_load

Content = Mapping[str, Any]
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- figures: end -->)", re.DOTALL)
SECTIONS: dict[str, tuple[str, Callable[[Any, Content], Iterable[str]]]] = {
    "findings": ("Findings", page_findings.findings),
    "workload": ("Traffic", page_capacity.workload),
    "rules": ("Prefill: rules against load", page_load.rules),
    "bins": ("Bins where a token pays for its past", page_load.bins),
    "mix": ("Mixed traffic", page_load.mix),
    "rising": ("The service at rising traffic", page_load.rising),
    "side": ("Which side reads a prefix", page_load.side),
    "decode": ("Decode placement", page_load.decode),
    "retention": ("Retention", page_capacity.retention),
    "capacity": ("155 trillion tokens a day", page_capacity.capacity),
    "router": ("The router's core", page_capacity.router),
    "faults": ("Faults", page_capacity.faults),
    "constants": ("Constants", page_capacity.constants),
}


def write_page(path: Path, content: Content, pictures: Sequence[Path]) -> None:
    """Rewrite the blocks of a page whose studies have run. Raises ValueError for a page without any block."""
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        text = "# Figures of the service\n" + "".join(
            f"\n## {title}\n\n<!-- figures: {name} -->\n<!-- figures: end -->\n"
            for name, (title, _) in SECTIONS.items()
        )
    content = {**content, "findings": all(content.get(name) for name in page_findings.NEEDS)}
    links = {picture.stem: os.path.relpath(picture, path.parent) for picture in pictures}

    def block(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in SECTIONS:
            raise ValueError(f"{path}: got a block {name}, allowed are {', '.join(SECTIONS)}")
        if not content.get(name):
            return match.group(0)
        parts = [f"![{SECTIONS[name][0]}]({links[name]})"] if name in links else []
        return (
            match.group(1) + "\n\n".join([*parts, *SECTIONS[name][1](content[name], content)]) + "\n" + match.group(3)
        )

    text, count = _BLOCK.subn(block, text)
    if not count:
        raise ValueError(f"{path}: got no <!-- figures: NAME -->, allowed is a page with a place for them")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
