"""The recipe's hooks, which the package holds, under the short name that its scripts give them.

    --custom-generate-function-path generate_with_retool.generate
    --custom-rm-path generate_with_retool.reward_func
"""

from slime_retool.recipes.retool.generate_with_retool import (
    HookArgs,
    check_label,
    check_prompt,
    check_tools,
    generate,
    generate_with_tools,
    reward_func,
)

__all__ = [
    "HookArgs",
    "check_label",
    "check_prompt",
    "check_tools",
    "generate",
    "generate_with_tools",
    "reward_func",
]
