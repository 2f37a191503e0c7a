"""Fused elementwise parts of a layer: plain versions against a written-out float64 one, kernels against those."""

from __future__ import annotations

import math

import pytest
import torch
from triton_utils import run_in_interpreter

from megatron_bridge import layer_spec
from megatron_bridge.fused import split_norm_rotate, swiglu
from megatron_bridge.layer_spec import resolve_attention_backend


@pytest.mark.parametrize("rotary", [8, 4])
@pytest.mark.parametrize("norm", [True, False])
def test_queries_and_keys_are_normalised_per_head_and_turned(norm: bool, rotary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, groups, ratio, width, eps = 3, 2, 3, 8, 1e-6
    mixed = torch.randn(rows, groups, ratio + 2, width, generator=generator)
    angles = torch.randn(rows, rotary // 2, generator=generator)
    weights = [1 + torch.rand(width, generator=generator) if norm else None for _ in range(2)]
    query, key, value = split_norm_rotate(mixed, *weights, angles.cos(), angles.sin(), eps)

    def expected(head: torch.Tensor, weight: torch.Tensor | None, row: int) -> list[float]:
        x = head.double().tolist()
        if weight is not None:
            rms = math.sqrt(sum(v * v for v in x) / width + eps)
            x = [v / rms * w for v, w in zip(x, weight.double().tolist(), strict=True)]
        out = list(x)
        for i, angle in enumerate(angles[row].tolist()):
            a, b = x[i], x[i + rotary // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + rotary // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    for row in range(rows):
        for group in range(groups):
            for head in range(ratio):
                want = expected(mixed[row, group, head], weights[0], row)
                assert query[row, group * ratio + head].tolist() == pytest.approx(want, abs=1e-5)
            assert key[row, group].tolist() == pytest.approx(expected(mixed[row, group, -2], weights[1], row), abs=1e-5)
    assert torch.equal(value, mixed[:, :, -1])


def test_swiglu_is_silu_of_the_first_half_times_the_second() -> None:
    x = torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(0))
    gate, up = x[..., :3].double(), x[..., 3:].double()
    torch.testing.assert_close(swiglu(x), (gate / (1 + (-gate).exp()) * up).float())


def test_flash_attn_4_is_chosen_only_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(backend: str, **changed: object) -> str:
        model = {"impl": "local", "head_dim": 128, "cp": 1, "dtype": torch.bfloat16}
        return resolve_attention_backend(backend, **{**model, **changed})  # type: ignore[arg-type]

    assert [resolve(name) for name in ("auto", "flash", "fused")] == ["fused"] * 3  # the CPU
    with pytest.raises(ValueError, match="fa4 is unknown: choose one of auto, flash, fused"):
        resolve("fa4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(layer_spec.importlib.util, "find_spec", lambda name: object())
    assert [resolve(name) for name in ("auto", "flash", "fused")] == ["flash", "flash", "fused"]
    assert resolve("auto", impl="transformer_engine", cp=2) == resolve("auto", head_dim=256) == "fused"
    with pytest.raises(ValueError, match="--attention-backend flash needs --precision bf16"):
        resolve("flash", dtype=torch.float32)
    monkeypatch.setattr(layer_spec.importlib.util, "find_spec", lambda name: None)
    assert resolve("auto") == "fused"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match="needs a Hopper or Blackwell GPU: use auto or fused"):
        resolve("flash")


KERNELS = """
import torch
from megatron_bridge import fused, fused_triton

torch.manual_seed(0)

def gradients(function, inputs, grads):
    inputs = [None if x is None else x.clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(out, grads)
    return [x.detach() for x in out] + [x.grad for x in inputs if x is not None]

def check(plain, function, inputs, shapes):
    grads = [torch.randn(shape) for shape in shapes]
    for got, want in zip(gradients(function, inputs, grads), gradients(plain, inputs, grads), strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5), (got - want).abs().max()

rows, groups, ratio, width = 37, 2, 3, 16
angles = torch.randn(rows, width // 2)
tables = (angles.cos(), angles.sin(), 1e-6)
mixed = torch.randn(rows, groups, ratio + 2, width)
shapes = [(rows, groups * ratio, width), (rows, groups, width), (rows, groups, width)]
for weights in ([None, None], [1 + torch.rand(width), 1 + torch.rand(width)]):
    check(
        lambda *given: fused._split_norm_rotate(*given, *tables),
        lambda *given: fused_triton.SplitNormRotate.apply(*given, *tables),
        [mixed, *weights], shapes,
    )
check(fused.swiglu, fused_triton.SwiGLU.apply, [torch.randn(3, 1, 2 * 2500)], [(3, 1, 2500)])
print("equal")
"""


def test_gpu_kernels_equal_the_plain_ones_in_tritons_interpreter() -> None:
    run_in_interpreter(KERNELS)
