"""Schemas that no finite text satisfies: recursion without an end.

The grammar engine finds contradictions, but a schema whose every value contains another of its kind (a list node
with a required next node) only shows when the text can go on no more. It is refused beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ONE = ("items", "additionalProperties", "contains", "propertyNames", "if", "then", "else", "not")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_PASSES = 200


def check_finite(root: dict[str, Any]) -> None:
    """Raises ValueError if some part of the schema `root` that can be reached allows no finite value."""
    nodes = list(_reachable(root))
    finite: set[int] = set()
    for _ in range(_PASSES):
        before = len(finite)
        finite.update(id(node) for node in reversed(nodes) if id(node) not in finite and _ends(node, root, finite))
        if len(finite) == len(nodes):
            return
        if len(finite) == before:
            break
    raise ValueError("grammar (json_schema): no finite text satisfies it, as a part of it always contains itself again")


def resolve(root: dict[str, Any], reference: Any) -> Any:
    """The part of `root` that a local JSON pointer names, or None for other references and missing parts."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    part: Any = root
    for key in filter(None, reference[1:].split("/")):
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and key.isdigit() and int(key) < len(part):
            part = part[int(key)]
        elif isinstance(part, dict) and key in part:
            part = part[key]
        else:
            return None
    return part


def _reachable(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    seen, todo = {id(root)}, [root]
    while todo:
        node = todo.pop()
        yield node
        for child in _children(node, root):
            if isinstance(child, dict) and id(child) not in seen:
                seen.add(id(child))
                todo.append(child)


def _children(node: dict[str, Any], root: dict[str, Any]) -> Iterator[Any]:
    """Schemas inside a node or named by it. Definitions count only where something refers to them."""
    yield resolve(root, node.get("$ref"))
    for key in _ONE:
        yield node.get(key)
    for key in _MANY:
        value = node.get(key)
        yield from value if isinstance(value, list) else ()
    for key in ("properties", "patternProperties"):
        value = node.get(key)
        yield from value.values() if isinstance(value, dict) else ()


def _ends(node: dict[str, Any], root: dict[str, Any], finite: set[int]) -> bool:
    def fine(schema: Any) -> bool:
        return not isinstance(schema, dict) or id(schema) in finite

    if not fine(resolve(root, node.get("$ref"))) or not all(map(fine, _list(node, "allOf"))):
        return False
    for key in ("anyOf", "oneOf"):
        if _list(node, key) and not any(map(fine, _list(node, key))):
            return False
    kinds = node.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds == ["object"]:
        properties = node.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        return all(fine(properties.get(name)) for name in _list(node, "required") if isinstance(name, str))
    if kinds == ["array"]:
        least = node.get("minItems", 0)
        return not (isinstance(least, int) and least > len(_list(node, "prefixItems"))) or fine(node.get("items"))
    return True


def _list(node: dict[str, Any], key: str) -> list[Any]:
    value = node.get(key)
    return value if isinstance(value, list) else []
