"""Checks a call's arguments against the tool's JSON Schema, by the jsonschema package.

Beyond the standard, 3.0 is not an integer, and arguments that a schema with `properties` does not name are refused
unless it says `"additionalProperties": true`.
"""

from __future__ import annotations

import reprlib
from itertools import islice
from typing import Any

from jsonschema import Draft4Validator, Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend
from referencing import Registry

MAX_PROBLEM = 500
"""Characters of a problem that are shown."""
_Validator = extend(Draft202012Validator, type_checker=Draft4Validator.TYPE_CHECKER)
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def check_arguments(arguments: dict[str, Any], parameters: dict[str, Any]) -> str | None:
    """What is wrong with `arguments`, in words for the model; None when they fit `parameters`."""
    try:
        validator = _Validator(_closed(parameters), registry=Registry())  # an empty one: nothing is fetched
        error = best_match(islice(validator.iter_errors(arguments), 1))
        return None if error is None else _describe(error)[:MAX_PROBLEM]
    except Exception as error:  # recursion too deep, a number that cannot be divided, a schema that is none
        return f"they cannot be checked against the tool's schema ({type(error).__name__})"


def _closed(schema: Any) -> Any:
    """The schema, its objects without further properties where it does not speak of them."""
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    if schema.get("properties"):
        closed["properties"] = {name: _closed(each) for name, each in schema["properties"].items()}
        closed.setdefault("unevaluatedProperties", False)
    return closed


def _describe(error: ValidationError) -> str:
    value, rule, known = error.instance, error.validator_value, error.schema.get("properties", {})
    place = error.json_path + "."
    if error.validator == "required":
        place += next(name for name in rule if name not in value)
        return f"missing required argument {place[2:]!r}"
    if rule is False:  # no further properties
        place += next(name for name in value if name not in known)
        return f"unknown argument {place[2:]!r} (known: {', '.join(map(repr, known))})"
    must, seen = f"satisfy {error.validator} {rule!r}", reprlib.repr(value)
    if error.validator == "type":
        must = "be " + (rule if isinstance(rule, str) else " or ".join(rule))
        seen = f"{_NAMES.get(type(value), 'null')} {seen}"
    elif error.validator == "enum":
        must = f"be one of {rule}"
    return f"argument {place[2:-1]!r} must {must}, got {seen}"
