"""HF <-> torch_dist in one process: flags against config.json, layouts, round trips, the command lines."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_models import KINDS, assert_converts_back, save_tiny_model, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_bridge import torch_dist_io
from megatron_bridge.checkpoint import is_weight, latest_iteration, resolve_checkpoint_dir
from megatron_bridge.convert import convert_hf_to_torch_dist, convert_torch_dist_to_hf, replace_directory
from megatron_bridge.flags import OneLineParser, add_flags, from_namespace, to_flags
from megatron_bridge.hf_config import check_against_hf, model_args_from_hf, read_hf_config
from megatron_bridge.layout import from_hf, megatron_shape, merge_tp, to_hf
from megatron_bridge.model_config import ModelArgs, check_pipeline, padded_vocab_size
from megatron_bridge.names import FAMILIES, GATED, find_parameter, global_name, hf_names, megatron_names
from megatron_bridge.safetensors_io import SafetensorsCheckpoint
from megatron_bridge.torch_dist_io import TorchDistReader
from slime_retool.cli import main as slime_retool

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture(scope="module")
def bf16_checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {kind: save_tiny_model(kind, root / kind, torch.bfloat16) for kind in KINDS}


def all_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(directory.glob("*.safetensors")) for k, v in load_file(path).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_gives_back_every_file_byte_for_byte(kind, bf16_checkpoints, tmp_path):
    source = bf16_checkpoints[kind]
    model = model_args_from_hf(read_hf_config(source))
    directory = convert_hf_to_torch_dist(model, source, tmp_path / "td", tp=2, progress=False)
    assert latest_iteration(tmp_path / "td") is None and resolve_checkpoint_dir(tmp_path / "td") == directory
    convert_torch_dist_to_hf(tmp_path / "td", tmp_path / "back", source, progress=False)
    files = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == files
    assert len([name for name in files if name.endswith(".safetensors")]) > 1
    for name in files:
        if name.endswith("index.json"):
            original, written = (json.loads((d / name).read_text()) for d in (source, tmp_path / "back"))
            assert written["weight_map"] == original["weight_map"]
            assert written["metadata"]["total_size"] == sum(t.nbytes for t in all_tensors(source).values())
        else:
            assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes(), name


def test_a_converted_checkpoint_is_laid_out_as_megatron_does(bf16_checkpoints, tmp_path):
    """Interleaving per key/value head: [q of head 0 | k 0 | v 0 | q of head 1 | ...]; MLP: gate over up."""
    source = bf16_checkpoints["qwen3"]
    model = model_args_from_hf(read_hf_config(source))
    reader = TorchDistReader(convert_hf_to_torch_dist(model, source, tmp_path / "td", progress=False))
    hf = all_tensors(source)
    q, k, v = (hf[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv")
    expected = torch.cat([q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]])
    assert torch.equal(reader.read("decoder.layers.1.self_attention.linear_qkv.weight"), expected)
    mlp = torch.cat([hf[f"model.layers.2.mlp.{p}_proj.weight"] for p in ("gate", "up")])
    assert torch.equal(reader.read("decoder.layers.2.mlp.linear_fc1.weight"), mlp)
    embedding = reader.read("embedding.word_embeddings.weight")
    assert embedding.shape == (128, 32) and not embedding[101:].any()
    assert torch.equal(embedding[:101], hf["model.embed_tokens.weight"])


def test_experts_in_one_tensor_are_refused_by_name(tmp_path):
    """What transformers 5 holds in memory; what it writes by default has one tensor for each."""
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in all_tensors(tmp_path))
    args = model_args_from_hf(read_hf_config(tmp_path))
    with pytest.raises(ValueError, match=r"in one tensor \(model\.layers\.0\.mlp\.experts\.gate_up_proj\)"):
        convert_hf_to_torch_dist(args, tmp_path, tmp_path / "td", progress=False)


def test_an_expert_is_found_without_a_look_at_all_others(bf16_checkpoints, tmp_path, monkeypatch):
    """Torch goes through every chunk that it is given: for a stack of n experts that would be n^2 in all."""
    source = bf16_checkpoints["qwen3_moe"]
    model = model_args_from_hf(read_hf_config(source))
    reader = TorchDistReader(convert_hf_to_torch_dist(model, source, tmp_path / "td", progress=False))
    given: list[int] = []
    search = torch_dist_io.create_read_items_for_chunk_list
    monkeypatch.setattr(
        torch_dist_io,
        "create_read_items_for_chunk_list",
        lambda key, stored, wanted: given.append(len(stored.chunks)) or search(key, stored, wanted),
    )
    for name in megatron_names(model):
        reader.read(name)
    assert len(given) == len(megatron_names(model)) and set(given) == {1}


def split_tp(name: str, full: torch.Tensor, tp: int, model: ModelArgs) -> list[torch.Tensor]:
    """The shard of each tensor-parallel rank."""
    parameter = find_parameter(name, model)
    if parameter.tp_axis is None:
        return [full] * tp
    if parameter.kind == GATED:
        gate, up = full.chunk(2)
        return [torch.cat(pair) for pair in zip(gate.chunk(tp), up.chunk(tp), strict=True)]
    return list(full.chunk(tp, dim=parameter.tp_axis))


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_every_parameter_merge_to_the_full_tensor(kind, bf16_checkpoints):
    source = bf16_checkpoints[kind]
    model = model_args_from_hf(read_hf_config(source))
    hf = all_tensors(source)
    covered = set()
    for name in megatron_names(model):
        full = from_hf(name, hf, model, tp=2)
        assert full.shape == megatron_shape(name, model, tp=2)
        shards = split_tp(name, full, 2, model)
        assert torch.equal(merge_tp(name, shards, model), full)
        for hf_name, tensor in to_hf(name, full, model):
            assert torch.equal(tensor, hf[hf_name])
            covered.add(hf_name)
    assert covered == set(hf)


def test_a_gated_shard_holds_its_part_of_gate_and_of_up(bf16_checkpoints):
    model = model_args_from_hf(read_hf_config(bf16_checkpoints["llama"]))
    full = torch.arange(96.0)[:, None].expand(96, 32)
    first, second = split_tp("decoder.layers.0.mlp.linear_fc1.weight", full, 2, model)
    assert first[:, 0].tolist() == [*range(24), *range(48, 72)]
    assert second[:, 0].tolist() == [*range(24, 48), *range(72, 96)]


def test_names_of_local_modules_and_wrappers_become_checkpoint_names(bf16_checkpoints):
    dense, mixed = (model_args_from_hf(read_hf_config(bf16_checkpoints[kind])) for kind in ("qwen3", "qwen3_mixed"))
    layer = "module.module.decoder.layers.1."
    qkv = "self_attention.linear_qkv.layer_norm_weight"
    assert global_name(f"{layer}input_layernorm.weight", dense) == f"decoder.layers.1.{qkv}"
    norm = f"{layer}pre_mlp_layernorm.weight"
    assert global_name(norm, dense) == "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    assert global_name(norm, mixed) == "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    assert global_name(norm, mixed, layer_offset=1) == "decoder.layers.2.pre_mlp_layernorm.weight"
    assert global_name("output_layer.weight", dense, layer_offset=5) == "output_layer.weight"


@pytest.mark.parametrize("local", ["local_experts.1.linear_fc2.weight", "linear_fc2.weight1"])
def test_experts_are_numbered_over_all_ranks(local, bf16_checkpoints):
    """Rank 1 of 2 holds the second half of six experts."""
    model = model_args_from_hf(read_hf_config(bf16_checkpoints["qwen3_moe"]))
    name = global_name(f"decoder.layers.0.mlp.experts.{local}", model, layer_offset=2, expert_offset=3)
    assert name == "decoder.layers.2.mlp.experts.experts.4.linear_fc2.weight"
    assert hf_names(name, model) == ["model.layers.2.mlp.experts.4.down_proj.weight"]
    with pytest.raises(ValueError, match="unknown"):
        find_parameter("decoder.layers.0.mlp.experts.experts.6.linear_fc2.weight", model)


def test_a_tied_output_layer_is_not_sent_twice(bf16_checkpoints):
    model = model_args_from_hf(read_hf_config(bf16_checkpoints["qwen2"]))
    assert to_hf("output_layer.weight", torch.zeros(128, 32), model) == []


def assert_refused(checkpoint: Path, change: dict[str, Any], message: str) -> None:
    """The model's flags fit config.json, and do not with this change."""
    config = read_hf_config(checkpoint)
    model = model_args_from_hf(config)
    check_against_hf(model, config)
    with pytest.raises(ValueError, match=message):
        check_against_hf(dataclasses.replace(model, **change), config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 4}, r"--num-layers 4, .*num_hidden_layers is 3"),
        ({"hidden_size": 64}, r"--hidden-size 64, .*hidden_size is 32"),
        ({"ffn_hidden_size": 64}, r"--ffn-hidden-size 64, .*intermediate_size is 48"),
        ({"num_attention_heads": 8}, r"--num-attention-heads 8, .*is 4"),
        ({"num_query_groups": 4}, r"--num-query-groups 4, .*num_key_value_heads is 2"),
        ({"group_query_attention": False, "num_query_groups": None}, r"num_key_value_heads is 2"),
        ({"kv_channels": 8}, r"--kv-channels 8, .*is 16"),
        ({"kv_channels": None}, r"--kv-channels 8, .*is 16"),
        ({"vocab_size": 128}, r"--vocab-size 128, .*vocab_size is 101"),
        ({"vocab_size": None}, r"--vocab-size is missing"),
        ({"rotary_base": 10000}, r"--rotary-base 10000, .*rope_theta is 5000000 \(fix: --rotary-base 5000000\)"),
        ({"rotary_percent": 0.5}, r"--rotary-percent 0.5"),
        ({"norm_epsilon": 1e-5}, r"--norm-epsilon 1e-05, .*rms_norm_eps is 1e-06"),
        ({"normalization": "LayerNorm"}, r"--normalization LayerNorm, .*RMSNorm"),
        ({"max_position_embeddings": 1}, r"--max-position-embeddings 1, .*is 256"),
        ({"swiglu": False}, r"--swiglu is not given"),
        ({"disable_bias_linear": False}, r"--disable-bias-linear is not given"),
        ({"use_rotary_position_embeddings": False}, r"--use-rotary-position-embeddings is not given"),
        ({"add_qkv_bias": True}, r"--add-qkv-bias is given, .*qwen3 \(fix: remove --add-qkv-bias\)"),
        ({"qk_layernorm": False}, r"--qk-layernorm is not given, .*\(fix: add --qk-layernorm\)"),
        ({"use_rope_scaling": True}, r"--use-rope-scaling is given, .*rope_type default"),
        ({"untie_embeddings_and_output_weights": False}, r"tie_word_embeddings false"),
    ],
)
def test_a_flag_that_differs_from_the_config_is_refused(change, message, bf16_checkpoints):
    assert_refused(bf16_checkpoints["qwen3"], change, message)


def test_every_flag_that_describes_the_model_is_compared(bf16_checkpoints):
    """Whatever single field is changed, the comparison notices; only the padding is free."""
    config = read_hf_config(bf16_checkpoints["llama"])
    model = model_args_from_hf(config)
    for field in dataclasses.fields(model):
        if field.name == "make_vocab_size_divisible_by":
            continue
        value = getattr(model, field.name)
        other = not value if isinstance(value, bool) else "LayerNorm" if isinstance(value, str) else (value or 1) * 2
        with pytest.raises(ValueError):
            check_against_hf(dataclasses.replace(model, **{field.name: other}), config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported: one of llama"),
        ({"model_type": "gpt_oss"}, "supported: its attention sinks are missing: megatron-core.*; one of llama"),
        ({"model_type": "qwen3_5_moe"}, "gated delta net layers .*flash-linear-attention"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "'yarn'.*not implemented"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'.*not implemented"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_a_model_that_is_not_implemented_is_refused(change, message, bf16_checkpoints):
    config = {**read_hf_config(bf16_checkpoints["qwen3"]), **change}
    with pytest.raises(ValueError, match=message):
        model_args_from_hf(config)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("glm4_moe", {"attention_bias": False}, "attention_bias False is not supported for glm4_moe, only True"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob False .*divides the weights by their sum"),
        ("glm4_moe", {"n_group": 2}, "n_group 2 .*groups of experts"),
        ("glm4_moe", {"topk_group": 2}, "topk_group 2 .*groups of experts"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias False"),
        ("qwen2_moe", {"attention_bias": True}, "attention_bias True"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window 4096 is not supported for mixtral"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("qwen3", {"use_qk_norm": False}, "use_qk_norm False .*type qwen3, .*always have norms"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm False .*qwen3_moe, .*always have norms"),
        ("llama", {"use_qk_norm": True}, "use_qk_norm True .*llama, .*never have norms"),
        ("qwen2_moe", {"use_qk_norm": True}, "use_qk_norm True .*qwen2_moe, .*never have norms"),
    ],
)
def test_what_a_family_does_not_have_is_refused(kind, change, message, bf16_checkpoints):
    config = read_hf_config(bf16_checkpoints[kind])
    model_args_from_hf(config)
    with pytest.raises(ValueError, match=message):
        model_args_from_hf({**config, **change})


@pytest.mark.parametrize(
    ("kind", "said"), [("qwen3", True), ("qwen3_moe", True), ("llama", False), ("qwen2", False), ("glm4_moe", None)]
)
def test_a_config_may_say_what_its_family_always_has(kind, said, bf16_checkpoints):
    """Qwen3-Coder-30B-A3B's config.json has use_qk_norm true beside model_type qwen3_moe."""
    config = read_hf_config(bf16_checkpoints[kind])
    config.pop("use_qk_norm", None)
    assert model_args_from_hf({**config, "use_qk_norm": said}) == model_args_from_hf(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_router_score_function": "softmax"}, "softmax, but config.json's router's score function is sigmoid"),
        ({"moe_router_enable_expert_bias": False}, "--moe-router-enable-expert-bias is not given"),
        ({"moe_router_topk_scaling_factor": 1.0}, r"config.json's routed_scaling_factor is 2.5"),
        ({"moe_router_topk_scaling_factor": None}, r"--moe-router-topk-scaling-factor is missing"),
        ({"moe_shared_expert_intermediate_size": 20}, "shared expert's width is 64"),
        ({"moe_shared_expert_gate": True}, "--moe-shared-expert-gate is given"),
        ({"rotary_percent": 1.0}, "partial_rotary_factor is 0.5"),
        ({"moe_layer_freq": "1"}, r"pattern of layers is \[0,1,1\]"),
    ],
)
def test_a_flag_of_the_router_that_differs_is_refused(change, message, bf16_checkpoints):
    assert_refused(bf16_checkpoints["glm4_moe"], change, message)


def test_glm_rotates_half_of_each_head_where_the_config_does_not_say(bf16_checkpoints):
    """As transformers' Glm4MoeConfig does."""
    config = read_hf_config(bf16_checkpoints["glm4_moe"])
    config["rope_parameters"].pop("partial_rotary_factor")
    assert model_args_from_hf(config).rotary_percent == 0.5


def test_layers_beyond_the_models_go_through_a_conversion_as_they_are(bf16_checkpoints, tmp_path):
    """GLM-4.5's files hold a head that predicts the token after the next one, as one more layer."""
    source = tmp_path / "hf"
    shutil.copytree(bf16_checkpoints["glm4_moe"], source)
    (source / "model.safetensors.index.json").unlink()
    for path in source.glob("*.safetensors"):
        path.unlink()
    tensors = all_tensors(bf16_checkpoints["glm4_moe"])
    beyond = {name.replace(".2.", ".3.", 1): value + 1 for name, value in tensors.items() if "layers.2." in name}
    tensors |= beyond | {"model.layers.3.eh_proj.weight": torch.ones(32, 64)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = read_hf_config(source)
    with pytest.raises(ValueError, match="no parameter takes"):
        convert_hf_to_torch_dist(model_args_from_hf(config), source, tmp_path / "td", progress=False)
    (source / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    convert_hf_to_torch_dist(model_args_from_hf(config), source, tmp_path / "td", progress=False)
    assert TorchDistReader(tmp_path / "td" / "release").num_layers() == 3
    convert_torch_dist_to_hf(tmp_path / "td", tmp_path / "back", source, progress=False)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_rope_theta_is_read_in_the_spelling_of_transformers_4_and_5(bf16_checkpoints):
    config = read_hf_config(bf16_checkpoints["llama"])
    new = model_args_from_hf(config)
    rope = dict(config["rope_parameters"])
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    old |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert model_args_from_hf(old) == new
    assert (new.rotary_base, new.use_rope_scaling, new.rope_scaling_factor) == (10000, True, 8.0)


def test_every_family_says_which_parameters_it_adds():
    counts = {name: len(family.layer_parameters()) for name, family in FAMILIES.items()}
    dense = {"llama": 6, "qwen2": 7, "qwen3": 8}
    assert counts == {**dense, "qwen3_moe": 8, "qwen2_moe": 7, "glm4_moe": 7, "mixtral": 6}
    mixtures = {name: len(family.layer_parameters(6)) - 6 * 2 for name, family in FAMILIES.items() if family.mixture}
    assert mixtures == {"qwen3_moe": 7, "qwen2_moe": 9, "glm4_moe": 9, "mixtral": 5}
    glm = FAMILIES["glm4_moe"]
    assert (
        glm.with_qk_norm is not None and len(glm.with_qk_norm.layer_parameters(6)) == len(glm.layer_parameters(6)) + 2
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (dict(num_layers=3, pp=2), "--decoder-last-pipeline-num-layers 1"),
        (dict(num_layers=36, pp=8), "--decoder-last-pipeline-num-layers 1"),
        (dict(num_layers=4, pp=2, first=3, last=3), "do not fit"),
        (dict(num_layers=4, pp=8), "use at most 4"),
        (dict(num_layers=4, pp=1, first=2), "above 1"),
    ],
)
def test_layers_that_do_not_fit_the_stages_are_refused_with_a_choice(layout, message):
    with pytest.raises(ValueError, match=message):
        check_pipeline(**layout)


@pytest.mark.parametrize("num_layers", [3, 5, 7, 30, 36, 37, 61])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_the_layout_named_by_the_refusal_is_accepted(num_layers, pp):
    if pp > num_layers or num_layers % pp == 0:
        return
    with pytest.raises(ValueError) as refusal:
        check_pipeline(num_layers, pp)
    last = int(str(refusal.value).split("--decoder-last-pipeline-num-layers ")[1].split()[0])
    check_pipeline(num_layers, pp, last=last)


def test_vocabulary_padding(bf16_checkpoints):
    model = model_args_from_hf(read_hf_config(bf16_checkpoints["qwen2"]))
    assert [padded_vocab_size(model, tp) for tp in (1, 2, 4)] == [128, 256, 512]


def run_tool(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / name), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_the_command_lines_convert_there_and_back(bf16_checkpoints, tmp_path):
    source = bf16_checkpoints["qwen3"]
    flags = to_flags(dataclasses.replace(model_args_from_hf(read_hf_config(source)), rotary_base=1000000))
    assert ["--rotary-base", "1000000"] == flags[flags.index("--rotary-base") :][:2]
    # given twice, the last wins
    there = run_tool(
        "convert_hf_to_torch_dist.py", *flags, "--hf-checkpoint", source, "--rotary-base", 5000000,
        "--save", tmp_path / "td",
    )  # fmt: skip
    assert there.returncode == 0, there.stderr
    back = run_tool(
        "convert_torch_dist_to_hf.py", "--input-dir", tmp_path / "td", "--output-dir", tmp_path / "back",
        "--origin-hf-dir", source,
    )  # fmt: skip
    assert back.returncode == 0, back.stderr
    original, written = all_tensors(source), all_tensors(tmp_path / "back")
    assert original.keys() == written.keys()
    assert all(torch.equal(value, written[k]) and value.dtype == written[k].dtype for k, value in original.items())


@pytest.mark.parametrize("flags", [(), ("--make-vocab-size-divisible-by", "64")])
def test_a_conversion_reads_the_model_from_the_checkpoint(flags, bf16_checkpoints, tmp_path):
    source = bf16_checkpoints["qwen3_moe"]
    there = ["convert", "to-megatron", *flags, "--hf-checkpoint", str(source), "--save", str(tmp_path / "td")]
    assert slime_retool(there) == 0
    assert_converts_back(tmp_path / "td", source)


def test_flags_that_are_given_to_a_conversion_are_compared(bf16_checkpoints, tmp_path, capsys):
    source = bf16_checkpoints["qwen3"]
    wrong = ["--rotary-base", "77", "--hf-checkpoint", str(source), "--save", str(tmp_path / "td")]
    assert slime_retool(["convert", "to-megatron", *wrong]) == 2
    assert "--num-layers is missing, but config.json's" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_the_flags_of_a_checkpoint_are_printed_as_a_shell_array(kind, bf16_checkpoints, tmp_path, capsys):
    source = bf16_checkpoints[kind]
    assert slime_retool(["convert", "flags", str(source)]) == 0
    (tmp_path / "model.sh").write_text(capsys.readouterr().out)
    shell = f'set -eu; source {tmp_path}/model.sh; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    printed = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
    parser = OneLineParser()
    add_flags(parser, ModelArgs)
    assert from_namespace(ModelArgs, parser.parse_args(printed)) == model_args_from_hf(read_hf_config(source))


def test_flags_of_what_is_no_checkpoint_are_refused_in_one_line(tmp_path, capsys):
    assert slime_retool(["convert", "flags", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "config.json does not exist" in said.err


@pytest.mark.parametrize(
    "wrong", [("--rotary-base", "1000000"), ("--num-layers", "4"), ("--no-such-flag",), ("--tie",)]
)
def test_the_command_line_refuses_in_one_line_with_exit_code_2(wrong, bf16_checkpoints, tmp_path):
    source = bf16_checkpoints["qwen3"]
    flags = to_flags(model_args_from_hf(read_hf_config(source)))
    if wrong == ("--tie",):
        flags.remove("--untie-embeddings-and-output-weights")
        wrong = ()
    result = run_tool(
        "convert_hf_to_torch_dist.py", *flags, *wrong, "--hf-checkpoint", source, "--save", tmp_path / "td"
    )
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1 and ": error: " in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_only_replaced_when_forced(bf16_checkpoints, tmp_path):
    source = bf16_checkpoints["qwen2"]
    model = model_args_from_hf(read_hf_config(source))
    out = tmp_path / "td"
    out.mkdir()
    (out / "latest_checkpointed_iteration.txt").write_text("7")
    for name in ("iter_0000007", "iter_0000008.part", "iter_0000003.old"):
        (out / name).mkdir()
    with pytest.raises(ValueError, match="--force"):
        convert_hf_to_torch_dist(model, source, out, progress=False)
    assert len(list(out.iterdir())) == 4
    convert_hf_to_torch_dist(model, source, out, force=True, progress=False)
    assert sorted(path.name for path in out.iterdir()) == ["latest_checkpointed_iteration.txt", "release"]
    assert [path.name for path in tmp_path.iterdir()] == ["td"]


HELD = {
    "a thesis": (["thesis.txt"], [], r"holds no checkpoint \(but thesis.txt\)"),
    "folders and no file": (["photos/one.jpg"], [], r"holds no checkpoint \(but photos\)"),
    "a hidden file": ([".bashrc"], [], r"holds no checkpoint \(but .bashrc\)"),
    "data of a browser": (["config.json", "data.json"], [], "holds no checkpoint"),
    "files beside Megatron weights": (["latest_checkpointed_iteration.txt", "notes.md"], ["release"], r"\(notes.md\)"),
    "folders beside Megatron weights": (
        ["latest_checkpointed_iteration.txt"],
        ["release", "critic", "iter_7"],
        r"more than a checkpoint \(critic, iter_7\)",
    ),
    "code beside Hugging Face weights": (["config.json", "a.safetensors", "train.py"], [], r"\(train.py\)"),
    "text beside adapters": (["adapter_config.json", "a.safetensors", "thesis.txt"], [], r"\(thesis.txt\)"),
    "folders beside Hugging Face weights": (["config.json", "a.safetensors"], ["x.json"], r"\(x.json\)"),
}


@pytest.mark.parametrize("case", HELD)
def test_force_deletes_nothing_but_a_checkpoint(case: str, tmp_path):
    files, folders, message = HELD[case]
    for name in files:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text(name)
    for name in folders:
        (tmp_path / "out" / name).mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message), replace_directory(tmp_path / "out", force=True, sources=[]):
        raise AssertionError("begun")
    assert sorted(tmp_path.rglob("*")) == before


def test_every_output_of_a_conversion_can_be_replaced(bf16_checkpoints, tmp_path):
    """Also with files that the original has beside its weights and other checkpoints do not."""
    source = tmp_path / "hf"
    shutil.copytree(bf16_checkpoints["qwen2"], source)
    (source / "USE_POLICY.txt").write_text("be good")
    model = model_args_from_hf(read_hf_config(source))
    for _ in range(2):
        convert_hf_to_torch_dist(model, source, tmp_path / "td", force=True, progress=False)
        convert_torch_dist_to_hf(tmp_path / "td", tmp_path / "back", source, force=True, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "td"]


def test_a_mount_point_is_refused_before_the_work_is_done(tmp_path, monkeypatch):
    """As in a container with a volume at the output: renaming onto it fails, at the end of a conversion."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with pytest.raises(ValueError, match="mount point"), replace_directory(tmp_path, force=False, sources=[]):
        raise AssertionError("begun")


def test_what_a_conversion_reads_is_never_replaced(bf16_checkpoints, tmp_path):
    source = bf16_checkpoints["qwen2"]
    model = model_args_from_hf(read_hf_config(source))
    hf, td = tmp_path / "models" / "hf", tmp_path / "models" / "td"
    shutil.copytree(source, hf)
    convert_hf_to_torch_dist(model, hf, td, progress=False)
    before = {path: path.read_bytes() for path in hf.parent.rglob("*") if path.is_file()}
    (tmp_path / "link").symlink_to(hf)
    for out in (hf, tmp_path / "models", tmp_path / "link"):
        with pytest.raises(ValueError, match=f"replacing {out} would delete {hf}, which is read"):
            convert_hf_to_torch_dist(model, hf, out, force=True, progress=False)
    for out, lost in ((td, td), (hf, hf), (tmp_path / "models", td)):
        with pytest.raises(ValueError, match=f"replacing {out} would delete {lost}, which is read"):
            convert_torch_dist_to_hf(td, out, hf, force=True, progress=False)
    assert {path: path.read_bytes() for path in hf.parent.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("occupied", [False, True])
def test_an_output_that_is_a_link_to_another_place_is_written_there(occupied: bool, bf16_checkpoints, tmp_path):
    source = bf16_checkpoints["qwen2"]
    model = model_args_from_hf(read_hf_config(source))
    (tmp_path / "disk" / "td").mkdir(parents=True)
    (tmp_path / "td").symlink_to(tmp_path / "disk" / "td")
    if occupied:
        (tmp_path / "disk" / "td" / "latest_checkpointed_iteration.txt").write_text("3")
    convert_hf_to_torch_dist(model, source, tmp_path / "td", force=occupied, progress=False)
    assert (tmp_path / "td").is_symlink() and [path.name for path in (tmp_path / "disk").iterdir()] == ["td"]
    names = sorted(path.name for path in (tmp_path / "disk" / "td").iterdir())
    assert names == ["latest_checkpointed_iteration.txt", "release"]


def test_a_failed_conversion_leaves_nothing_behind(bf16_checkpoints, tmp_path):
    source = bf16_checkpoints["llama"]
    damaged = tmp_path / "hf"
    damaged.mkdir()
    for path in source.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    victim = sorted(damaged.glob("*.safetensors"))[-1]
    victim.write_bytes(victim.read_bytes()[:-64])
    model = model_args_from_hf(read_hf_config(source))
    with pytest.raises(Exception, match="ends before tensor"):
        convert_hf_to_torch_dist(model, damaged, tmp_path / "td", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_damaged_index_is_named(content, bf16_checkpoints, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text((bf16_checkpoints["llama"] / "config.json").read_text())
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(content)
    model = model_args_from_hf(read_hf_config(tmp_path / "hf"))
    with pytest.raises(ValueError, match="model.safetensors.index.json is damaged"):
        convert_hf_to_torch_dist(model, tmp_path / "hf", tmp_path / "td", progress=False)


SHARDS = {
    "one tensor in two files": ({}, {"a": 2.0}, r"both one.safetensors and two.safetensors hold the tensor a"),
    "a tensor that its file lacks": ({"c": "two.safetensors"}, {}, "two.safetensors holds the tensor c, and it does"),
    "a tensor in another file": (
        {"a": "two.safetensors", "c": "one.safetensors"},
        {},
        "two.safetensors holds the tensor a, and it does not",
    ),
    "a missing file": ({"c": "three.safetensors"}, {}, "lacks three.safetensors"),
    "a file elsewhere": ({"c": "../one.safetensors"}, {}, "names ../one.safetensors, which is not a file of this"),
    "a file by its whole path": ({"c": "/one.safetensors"}, {}, "names /one.safetensors, which is not a file of this"),
    "a number for a file": ({"c": 3}, {}, "is damaged"),
}


@pytest.mark.parametrize("case", SHARDS)
def test_an_index_that_does_not_say_where_each_tensor_lies_is_refused(case: str, tmp_path):
    named, held, message = SHARDS[case]
    one, two = ({name: torch.tensor([value]) for name, value in f.items()} for f in ({"a": 1.0}, {"b": 1.0} | held))
    hf = tmp_path / "hf"
    hf.mkdir()
    for path, tensors in (("one", one), ("two", two)):
        save_file(tensors, hf / f"{path}.safetensors")
    save_file(one, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"} | named}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        SafetensorsCheckpoint(hf)


def test_files_without_an_index_hold_each_tensor_once(tmp_path):
    for name in ("one", "two"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="both one.safetensors and two.safetensors hold the tensor a"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(("file", "keep"), [(".metadata", 0), (".metadata", 100), ("__0_0.distcp", 0)])
def test_a_damaged_torch_dist_checkpoint_is_named(file, keep, bf16_checkpoints, tmp_path):
    """As what an interrupted copy leaves: files of their full length whose end is zeros."""
    source = bf16_checkpoints["llama"]
    model = model_args_from_hf(read_hf_config(source))
    path = convert_hf_to_torch_dist(model, source, tmp_path / "td", progress=False) / file
    content = path.read_bytes()
    path.write_bytes(content[:keep] + bytes(len(content) - keep))
    with pytest.raises(ValueError, match=f"{file} is (incomplete|damaged)"):
        convert_torch_dist_to_hf(tmp_path / "td", tmp_path / "back", source, progress=False)


def test_a_tied_checkpoint_may_hold_its_head_if_it_equals_the_embedding(bf16_checkpoints, tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    tensors = all_tensors(bf16_checkpoints["qwen2"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    (source / "config.json").write_text((bf16_checkpoints["qwen2"] / "config.json").read_text())
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    model = model_args_from_hf(read_hf_config(source))
    convert_hf_to_torch_dist(model, source, tmp_path / "td", progress=False)
    convert_torch_dist_to_hf(tmp_path / "td", tmp_path / "back", source, progress=False)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    with safe_open(tmp_path / "back" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        convert_hf_to_torch_dist(model, source, tmp_path / "other", progress=False)


def test_weights_of_another_model_are_not_written_into_a_checkpoint(bf16_checkpoints, tmp_path):
    source = bf16_checkpoints["qwen2"]
    convert_hf_to_torch_dist(model_args_from_hf(read_hf_config(source)), source, tmp_path / "td", progress=False)
    with pytest.raises(ValueError, match="another model|shape"):
        convert_torch_dist_to_hf(tmp_path / "td", tmp_path / "back", bf16_checkpoints["qwen3"], progress=False)


def with_config(source: Path, target: Path, change: dict, keep: str) -> Path:
    """`source` with another config.json, and those of its tensors whose names match `keep`."""
    target.mkdir()
    (target / "config.json").write_text(json.dumps({**read_hf_config(source), **change}))
    tensors = {name: value for name, value in all_tensors(source).items() if re.fullmatch(keep, name)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("kind", "change", "keep", "beyond"),
    [
        ("qwen2", {"model_type": "llama"}, r".*weight", r"decoder\.layers\.self_attention\.linear_qkv\.bias \(1\)"),
        (
            "glm4_moe",
            {"use_qk_norm": False},
            r"(?!.*[qk]_norm).*",
            r"decoder\.layers\.0\.self_attention\..*norm\.weight, .* \(6\)",
        ),
    ],
)
def test_weights_that_the_original_has_no_place_for_are_named(kind, change, keep, beyond, bf16_checkpoints, tmp_path):
    source = bf16_checkpoints[kind]
    convert_hf_to_torch_dist(model_args_from_hf(read_hf_config(source)), source, tmp_path / "td", progress=False)
    origin = with_config(source, tmp_path / "hf", change, keep)
    with pytest.raises(ValueError, match=f"no place for: {beyond}"):
        convert_torch_dist_to_hf(tmp_path / "td", tmp_path / "back", origin, progress=False)


@pytest.mark.parametrize(
    ("key", "weight"),
    [
        ("decoder.layers.mlp.linear_fc1.weight", True),
        ("output_layer.weight", True),
        ("mtp.layers.0.eh_proj.weight", False),
        ("optimizer.state.exp_avg.output_layer.weight", False),
        ("chained_1.optimizer.state.param.output_layer.weight", False),
        ("decoder.layers.self_attention._extra_state", False),
    ],
)
def test_what_counts_as_a_models_weight(key: str, weight: bool) -> None:
    assert is_weight(key) is weight


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_a_stack_of_more_experts_holds_weights_beyond_the_models(kind, bf16_checkpoints, tmp_path):
    source = bf16_checkpoints[kind]
    model = model_args_from_hf(read_hf_config(source))
    reader = TorchDistReader(convert_hf_to_torch_dist(model, source, tmp_path / "td", progress=False))
    reader.check_nothing_beyond(megatron_names(model))
    fewer = dataclasses.replace(model, num_experts=model.num_experts - 1)
    with pytest.raises(ValueError, match=r"no place for: .*mlp\.experts\.experts\.linear_fc1\.weight"):
        reader.check_nothing_beyond(megatron_names(fewer))
