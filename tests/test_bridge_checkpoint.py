"""Which keys of a model's sharded state go into a checkpoint."""

from __future__ import annotations

from typing import Any

from megatron_bridge.checkpoint import load_model_state, model_state_dict

WEIGHTS = ("mlp.experts.linear_fc1.weight0", "mlp.experts.linear_fc1.weight1", "mlp.router.weight")
EXTRA = (
    "self_attention.linear_qkv._extra_state",
    # Transformer Engine's grouped experts: one for each expert, the first without a number.
    "mlp.experts.linear_fc1._extra_state",
    "mlp.experts.linear_fc1._extra_state1",
    "mlp.experts.linear_fc1._extra_state12",
)


class GroupedExperts:
    """A stand-in for a GPTModel on Transformer Engine, which needs a GPU."""

    def sharded_state_dict(self) -> dict[str, Any]:
        return dict.fromkeys((*WEIGHTS, *EXTRA), 0)

    def load_state_dict(self, state: dict[str, Any], strict: bool) -> tuple[list[str], list[str]]:
        assert not strict
        return [key for key in (*WEIGHTS, *EXTRA) if key not in state], [key for key in state if key not in WEIGHTS]


def test_no_extra_state_is_saved_or_asked_for_and_none_is_missed():
    state = model_state_dict([GroupedExperts()])
    assert tuple(state["model"]) == WEIGHTS
    load_model_state([GroupedExperts()], state)
