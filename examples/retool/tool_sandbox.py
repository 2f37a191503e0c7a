"""The recipe's one tool, which the package holds: see `slime_retool.recipes.retool.tool_sandbox`."""

from slime_retool.recipes.retool.tool_sandbox import (
    PARAMETERS,
    SCHEMA,
    code_interpreter,
    format_result,
    make_tools,
    session_interpreter,
    tools,
)

__all__ = ["PARAMETERS", "SCHEMA", "code_interpreter", "format_result", "make_tools", "session_interpreter", "tools"]
