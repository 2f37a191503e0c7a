"""Checks a call's arguments against the part of JSON Schema that tool definitions use.

Covered: `type` (also as a list), `properties`, `required`, `items`, `enum`. Arguments that the schema does not
name are refused unless it says `"additionalProperties": true`.
"""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def check_arguments(arguments: dict[str, Any], parameters: dict[str, Any]) -> str | None:
    """What is wrong with `arguments`, in words for the model; None when they fit `parameters`."""
    return _check_object(arguments, parameters, "")


def _check_object(value: dict[str, Any], schema: dict[str, Any], path: str) -> str | None:
    properties = schema.get("properties") or {}
    for name in schema.get("required") or []:
        if name not in value:
            return f"missing required argument {path + name!r}"
    for name, entry in value.items():
        if name in properties:
            problem = _check_value(entry, properties[name], path + name)
            if problem:
                return problem
        elif properties and schema.get("additionalProperties") is not True:
            return f"unknown argument {path + name!r} (known: {', '.join(map(repr, properties))})"
    return None


def _check_value(value: Any, schema: dict[str, Any], path: str) -> str | None:
    expected = schema.get("type")
    if expected is not None:
        names = [expected] if isinstance(expected, str) else expected
        if not any(_is(value, name) for name in names):
            return f"argument {path!r} must be {' or '.join(names)}, got {_NAMES.get(type(value), 'null')}"
    if "enum" in schema and value not in schema["enum"]:
        return f"argument {path!r} must be one of {schema['enum']}"
    if isinstance(value, dict):
        return _check_object(value, schema, path + ".")
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, item in enumerate(value):
            problem = _check_value(item, schema["items"], f"{path}[{index}]")
            if problem:
                return problem
    return None


def _is(value: Any, name: str) -> bool:
    # In Python a bool is an int; in JSON it is not.
    if isinstance(value, bool) and name in ("integer", "number"):
        return False
    return isinstance(value, _TYPES.get(name, (object,)))
