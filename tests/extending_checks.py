"""What tests/test_extending.py runs in a copy of the packages with a documented change.

`extending_checks.py NAME FOLDER` leaves what the check found in FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def opo(folder: Path) -> None:
    """result.pt: advantages, and the loss's value and gradient, of the inputs in batch.pt."""
    from slime_retool.algo.advantages import AdvantageInputs, compute_advantages
    from slime_retool.algo.losses import LossInputs, TotalLoss
    from slime_retool.algo.segments import Segments
    from slime_retool.config import parse_config
    from slime_retool.config.parse import build_parser

    given = torch.load(folder / "batch.pt")
    config = parse_config(given["words"])
    inputs = AdvantageInputs(Segments(given["lengths"], given["mask"]), given["rewards"], given["groups"])
    advantages = compute_advantages(config.algorithm, inputs).advantages
    total = TotalLoss(config.loss_terms)
    log_probs = given["log_probs"].requires_grad_()
    columns = {"advantages": advantages.double(), "old_log_probs": log_probs.detach()}
    loss, metrics = total(
        LossInputs(weights=given["weights"], columns=columns, log_probs=log_probs, entropy=torch.zeros(len(log_probs)))
    )
    loss.backward()
    found = {"advantages": advantages, "loss": loss.detach(), "gradient": log_probs.grad, "metrics": metrics}
    torch.save(found | {"help": build_parser().format_help()}, folder / "result.pt")


def mistral(folder: Path) -> None:
    """logits.pt: transformers' and Megatron's logits of a tiny model whose weights went there and back in `folder`."""
    import torch.distributed as dist
    from bridge_models import build_model, hf_weights, load_model
    from transformers import MistralConfig, MistralForCausalLM

    from megatron_bridge.convert import convert_hf_to_torch_dist, convert_torch_dist_to_hf
    from megatron_bridge.hf_config import model_args_from_hf, read_hf_config

    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=101, max_position_embeddings=64, sliding_window=None, initializer_range=0.2,
    )  # fmt: skip
    reference = MistralForCausalLM(config).eval()
    reference.save_pretrained(folder / "hf")
    model = model_args_from_hf(read_hf_config(folder / "hf"))
    convert_hf_to_torch_dist(model, folder / "hf", folder / "td", progress=False)
    convert_torch_dist_to_hf(folder / "td", folder / "back", folder / "hf", progress=False)
    there, back = hf_weights(folder / "hf"), hf_weights(folder / "back")
    assert there.keys() == back.keys() and all(torch.equal(there[name], back[name]) for name in there)

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    gpt, _ = build_model(folder)
    load_model(gpt, folder / "td")
    tokens = torch.randint(0, 101, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = gpt(tokens, torch.arange(9)[None], None)[..., :101]
        torch.save((reference(tokens).logits, logits), folder / "logits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    {"opo": opo, "mistral": mistral}[sys.argv[1]](Path(sys.argv[2]))
