"""What a directory store holds, by walking it, while others write there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.cache.block_object import HEADER_BYTES, WrongBytes, parse
from orchestrator.cache.chain import KEY_BYTES
from orchestrator.cache.index import BlockIndex
from orchestrator.cache.retention import RetentionPolicy
from orchestrator.cache.store.directory_notes import Uses, read_owner


def there(path: Path) -> bool:
    """Is there such a file? No also where a mount is gone, and looking at all fails."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def survey(
    blocks: Path, path_of: Callable[[bytes], Path], uses: Uses, policy: RetentionPolicy
) -> tuple[BlockIndex, list[bytes]]:
    """An index of all files, and the keys of those that no path from a first block leads to, last ones first."""
    found = []
    for path in files(blocks):
        try:
            with path.open("rb") as file:
                header = parse(file.read(HEADER_BYTES))
                seen = os.fstat(file.fileno())
                owner = "" if header.depth else read_owner(file.fileno(), HEADER_BYTES + header.size)
        except (OSError, WrongBytes):
            continue
        if header.key.hex() == path.name:
            found.append((header.depth, header, seen, owner))
    index, holes, used = BlockIndex(policy), dict[bytes, None](), dict(uses)
    for _, header, seen, owner in sorted(found, key=lambda item: item[0]):
        root = b"" if header.depth else header.parent
        last = max(header.generation / 1e3, used.pop(header.key, 0.0))
        index.publish(header.key, header.parent, seen.st_size, last, root=root, expiry=seen.st_mtime, tenant=owner)
        if index.get(header.key) is None and (header.parent in holes or not there(path_of(header.parent))):
            holes[header.key] = None  # else its parent was written while this looked elsewhere
    for key in used:
        if not there(path_of(key)):
            uses.forget(key)
    return index, list(holes)[::-1]


def files(blocks: Path) -> Iterator[Path]:
    """All blocks' files."""
    for folder in blocks.iterdir():
        for path in folder.iterdir():
            if len(path.name) == 2 * KEY_BYTES:
                yield path
