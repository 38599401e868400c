"""The model card: README.md of a checkpoint folder, written from facts that the caller hands in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.train.log import read

_LOG_ROWS = 20
_HEADER = ("license", "language", "tags", "base_model", "datasets")


def write_card(folder: str | Path, facts: Mapping[str, Any]) -> Path:
    """Write README.md into `folder`; returns its path. A part whose facts are missing is left out.

    ============== ================================================================================================
    fact           content
    ============== ================================================================================================
    name, summary  title and first paragraphs (Markdown)
    header         YAML header: `license`, `language`, `tags`, `base_model`, `datasets`
    sizes          {what: value}, for instance {"parameters": 29981074}
    use            command line to run it
    data           `meta.json` of the dataset folder
    training       {"command", "hardware", "stages": [{"name", "steps", "tokens", "seconds", "phases", "note"}]}
    results        {measure: {"value", "unit", "stderr", "samples", "note"}}, all but the value optional
    limits         list of sentences
    logs           {stage: path of its log}; a table of some rows here, all lines go to training-log.jsonl
    pictures       {caption: file name in `folder`}
    ============== ================================================================================================
    """
    folder = Path(folder)
    for need in ("name", "summary"):
        if not facts.get(need):
            raise ValueError(f"facts: got no {need}, allowed is a card that has one")
    parts = [_header(facts.get("header", {})), f"# {facts['name']}", facts["summary"].strip()]
    parts += _sizes(facts) + _data(facts.get("data")) + _training(facts.get("training"))
    parts += _results(facts.get("results")) + _limits(facts.get("limits"))
    parts += [f"![{caption}]({file})" for caption, file in facts.get("pictures", {}).items()]
    parts += _logs(facts.get("logs", {}))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "README.md"
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    _copy_logs(folder, facts.get("logs", {}))
    return path


def _header(values: Mapping[str, Any]) -> str:
    unknown = sorted(set(values) - set(_HEADER))
    if unknown:
        raise ValueError(f"facts: got header entry {unknown[0]}, allowed is {', '.join(_HEADER)}")
    lines = []
    for name, value in values.items():
        items = value if isinstance(value, (list, tuple)) else None
        lines.append(f"{name}: {value}" if items is None else "\n".join([f"{name}:", *(f"  - {i}" for i in items)]))
    return "\n".join(["---", *lines, "---"]) if lines else ""


def _sizes(facts: Mapping[str, Any]) -> list[str]:
    parts = []
    if facts.get("sizes"):
        parts.append(_table(("", ""), facts["sizes"].items()))
    if facts.get("use"):
        parts.append(f"```\n{facts['use'].strip()}\n```")
    return parts


def _data(meta: Mapping[str, Any] | None) -> list[str]:
    if not meta:
        return []
    parts = ["## Data"]
    counts = [(part, *(meta[part][key] for key in ("documents", "bytes", "tokens"))) for part in ("train", "heldout")]
    parts.append(_table(("part", "documents", "bytes", "tokens"), counts))
    if meta.get("kinds"):
        parts.append(_table(("kind", "training tokens"), meta["kinds"].items()))
    if meta.get("sources"):
        columns = ("name", "version", "licence", "origin", "documents", "tokens")
        rows = [[source.get(column, "") for column in columns] for source in meta["sources"]]
        parts.append(_table(("source", *columns[1:]), rows))
    if meta.get("heldout", {}).get("names"):
        names = ", ".join(meta["heldout"]["names"])
        parts.append(f"<details><summary>Held-out documents</summary>\n\n{names}\n\n</details>")
    return parts


def _training(training: Mapping[str, Any] | None) -> list[str]:
    if not training:
        return []
    parts = ["## Training"]
    if training.get("command"):
        parts.append(f"```\n{training['command']}\n```")
    if training.get("hardware"):
        parts.append(f"Hardware: {training['hardware']}.")
    rows = [
        (stage["name"], stage["steps"], stage["tokens"], f"{stage['seconds'] / 60:.0f} min")
        for stage in training.get("stages", [])
    ]
    if rows:
        parts.append(_table(("stage", "steps", "tokens", "time"), rows))
    parts += [f"{stage['name']}: {stage['note']}" for stage in training.get("stages", []) if stage.get("note")]
    for stage in training.get("stages", []):
        if phases := stage.get("phases"):
            names = list(phases[0])
            parts.append(f"Phases of the {stage['name']} stage (`until` is a share of its steps):")
            parts.append(_table(names, [[phase[name] for name in names] for phase in phases]))
    return parts


def _results(results: Mapping[str, Mapping[str, Any]] | None) -> list[str]:
    if not results:
        return []
    columns = [c for c in ("unit", "stderr", "samples", "note") if any(c in row for row in results.values())]
    rows = [(name, row["value"], *(row.get(column, "") for column in columns)) for name, row in results.items()]
    return ["## Results", _table(("measure", "value", *columns), rows)]


def _limits(limits: Iterable[str] | None) -> list[str]:
    return ["## Limits", "\n".join(f"- {limit}" for limit in limits)] if limits else []


def _logs(logs: Mapping[str, str | Path]) -> list[str]:
    parts = []
    for stage, path in logs.items():
        lines = [line for line in read(path) if "loss" in line]
        picked = sorted({round(i * (len(lines) - 1) / (_LOG_ROWS - 1)) for i in range(_LOG_ROWS)}) if lines else []
        names = [n for n in lines[-1] if n != "elapsed"] if lines else []
        if picked:
            parts.append(f"### Log of the {stage} stage")
            parts.append(_table(names, [[lines[i].get(name) for name in names] for i in picked]))
    return ["## Log", "All lines are in [training-log.jsonl](training-log.jsonl).", *parts] if parts else []


def _copy_logs(folder: Path, logs: Mapping[str, str | Path]) -> None:
    if not logs:
        return
    partial = folder / ".training-log.jsonl.partial"
    with partial.open("w", encoding="utf-8") as file:
        for stage, path in logs.items():
            file.writelines(json.dumps({"stage": stage, **line}) + "\n" for line in read(path))
    shutil.move(partial, folder / "training-log.jsonl")


def _table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    columns = list(columns)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
