"""verl's hooks for equal work: the same as limited.py, as an agent loop and a reward function of verl."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class LimitedLoop(SingleTurnAgentLoop):
    """One turn of exactly the tokens that the data row says."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        limit = int(kwargs["extra_info"]["limit"])
        return await super().run({**sampling_params, "max_new_tokens": limit, "ignore_eos": True}, **kwargs)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    return float(len(solution_str) % 2)
