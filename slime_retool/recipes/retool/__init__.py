"""ReTool: `slime_retool.recipes.retool.generate_with_retool.generate` and `.reward_func`."""
