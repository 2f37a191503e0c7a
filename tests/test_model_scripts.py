"""scripts/models/*.sh against the published config.json values and parameter counts."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
import torch
from bridge_models import init_parallel
from dist_utils import run_distributed
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_bridge.arithmetic.parameters import total_parameters
from megatron_bridge.flags import OneLineParser, add_flags, from_namespace
from megatron_bridge.hf_config import check_against_hf
from megatron_bridge.layout import megatron_shape
from megatron_bridge.model_config import ModelArgs, alike_layers, padded_vocab_size
from megatron_bridge.names import EXPERT_BIAS, global_name, megatron_names

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts" / "models"

KEYS = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "rope_theta", "tie_word_embeddings",
)  # fmt: skip
EXPERT_KEYS = {
    "qwen3_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "qwen2_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "glm4_moe": (
        "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace",
        "routed_scaling_factor", "use_qk_norm",
    ),
    "mixtral": ("num_local_experts", "num_experts_per_tok"),
}  # fmt: skip
REST = {  # of a family's config.json
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen2_moe": {"norm_topk_prob": False, "decoder_sparse_step": 1},
    "glm4_moe": {
        "attention_bias": True, "partial_rotary_factor": 0.5, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    "mixtral": {"sliding_window": None},
}  # fmt: skip
# The published config.json's values (head_dim None: not in the file), then the published number of parameters.
PUBLISHED = {
    "qwen3-0.6B": (("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 1e-6, 1e6, True), 596_049_920),
    "qwen3-1.7B": (("qwen3", 28, 2048, 6144, 16, 8, 128, 151936, 1e-6, 1e6, True), 1_720_574_976),
    "qwen3-4B": (("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 1e-6, 1e6, True), 4_022_468_096),
    "qwen3-4B-Instruct-2507": (("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 1e-6, 5e6, True), 4_022_468_096),
    "qwen3-8B": (("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 1e-6, 1e6, False), 8_190_735_360),
    "qwen3-14B": (("qwen3", 40, 5120, 17408, 40, 8, 128, 151936, 1e-6, 1e6, False), 14_768_307_200),
    "qwen3-32B": (("qwen3", 64, 5120, 25600, 64, 8, 128, 151936, 1e-6, 1e6, False), 32_762_123_264),
    "qwen2.5-0.5B": (("qwen2", 24, 896, 4864, 14, 2, None, 151936, 1e-6, 1e6, True), 494_032_768),
    "qwen2.5-1.5B": (("qwen2", 28, 1536, 8960, 12, 2, None, 151936, 1e-6, 1e6, True), 1_543_714_304),
    "qwen2.5-3B": (("qwen2", 36, 2048, 11008, 16, 2, None, 151936, 1e-6, 1e6, True), 3_085_938_688),
    "qwen2.5-7B": (("qwen2", 28, 3584, 18944, 28, 4, None, 152064, 1e-6, 1e6, False), 7_615_616_512),
    "qwen2.5-14B": (("qwen2", 48, 5120, 13824, 40, 8, None, 152064, 1e-5, 1e6, False), 14_770_033_664),
    "qwen2.5-32B": (("qwen2", 64, 5120, 27648, 40, 8, None, 152064, 1e-5, 1e6, False), 32_763_876_352),
    "llama3.2-1B": (("llama", 16, 2048, 8192, 32, 8, 64, 128256, 1e-5, 5e5, True), 1_235_814_400),
    "llama3.2-3B": (("llama", 28, 3072, 8192, 24, 8, 128, 128256, 1e-5, 5e5, True), 3_212_749_824),
    "llama3.1-8B": (("llama", 32, 4096, 14336, 32, 8, None, 128256, 1e-5, 5e5, False), 8_030_261_248),
    "smollm2-135M": (("llama", 30, 576, 1536, 9, 3, None, 49152, 1e-5, 1e5, True), 134_515_008),
}
EXPERTS = {
    "qwen3-30B-A3B": (128, 8, 768),
    "qwen3-235B-A22B": (128, 8, 1536),
    "glm4.5-106B-A12B": (128, 8, 1408, 1, 1, 1.0, False),
    "glm4.5-355B-A32B": (160, 8, 1536, 1, 3, 2.5, True),
    "qwen1.5-moe-A2.7B": (60, 4, 1408, 5632),
    "mixtral-8x7B": (8, 2),
}
PUBLISHED |= {
    "qwen3-30B-A3B": (("qwen3_moe", 48, 2048, 6144, 32, 4, 128, 151936, 1e-6, 1e6, False), 30_532_122_624),
    "qwen3-235B-A22B": (("qwen3_moe", 94, 4096, 12288, 64, 4, 128, 151936, 1e-6, 1e6, False), 235_093_634_560),
    "glm4.5-106B-A12B": (("glm4_moe", 46, 4096, 10944, 96, 8, 128, 151552, 1e-5, 1e6, False), 106_852_245_504),
    "glm4.5-355B-A32B": (("glm4_moe", 92, 5120, 12288, 96, 8, 128, 151552, 1e-5, 1e6, False), 352_797_814_784),
    "qwen1.5-moe-A2.7B": (("qwen2_moe", 24, 2048, 5632, 16, 16, None, 151936, 1e-6, 1e6, False), 14_315_784_192),
    "mixtral-8x7B": (("mixtral", 32, 4096, 14336, 32, 8, None, 32000, 1e-5, 1e6, False), 46_702_792_704),
}
LLAMA3_FACTOR = {"llama3.2-1B": 32.0, "llama3.2-3B": 32.0, "llama3.1-8B": 8.0}


def published_config(name: str) -> dict:
    config = {key: value for key, value in zip(KEYS, PUBLISHED[name][0], strict=True) if value is not None}
    config |= {"hidden_act": "silu", "attention_dropout": 0.0}
    if name in EXPERTS:
        family = config["model_type"]
        config |= dict(zip(EXPERT_KEYS[family], EXPERTS[name], strict=True)) | REST[family]
    if name in LLAMA3_FACTOR:
        config["rope_scaling"] = {
            "rope_type": "llama3", "factor": LLAMA3_FACTOR[name], "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
        config["max_position_embeddings"] = 131072
    return config


def source(name: str, cwd: Path, before: str = "", after: str = "") -> ModelArgs:
    """The flags that bash passes on, unquoted, as the documented command line does."""
    script = f'set -eu; {before}\nsource "{SCRIPTS / name}.sh"\n{after}\nprintf "%s\\n" ${{MODEL_ARGS[@]}}'
    done = subprocess.run(["bash", "-c", script], cwd=cwd, capture_output=True, text=True, check=True)
    parser = OneLineParser()
    add_flags(parser, ModelArgs)
    return from_namespace(ModelArgs, parser.parse_args(done.stdout.split()))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, ModelArgs]:
    anywhere = tmp_path_factory.mktemp("anywhere")
    return {name: source(name, anywhere) for name in PUBLISHED}


def test_there_is_a_script_for_every_model_and_no_other():
    assert {path.stem for path in SCRIPTS.glob("*.sh")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_script_says_what_the_published_config_says(name, models):
    check_against_hf(models[name], published_config(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_add_up_to_the_published_number(name, models):
    """layers * (2H + QKV(+bias) + O + MLP (+ head norms)) + H + V * H * (1 or 2), and transformers' own model.

    MLP: 3HF, or with E experts of width f and a shared one of width s: E * 3Hf, 3Hs and the router's EH (+ H of its
    gate).
    """
    model, (values, published) = models[name], PUBLISHED[name]
    family, layers, hidden, ffn, heads, groups, width, vocab, _, _, tied = values
    width = width or hidden // heads
    qkv_rows = (heads + 2 * groups) * width
    experts, *rest = EXPERTS.get(name, (0,))
    dense, mlps = layers, 3 * hidden * ffn
    if experts:
        expert_ffn = ffn if family == "mixtral" else rest[1]
        shared = {"glm4_moe": 3 * hidden * expert_ffn, "qwen2_moe": (3 * rest[-1] + 1) * hidden}.get(family, 0)
        dense = rest[3] if family == "glm4_moe" else 0
        mlps = dense * mlps + (layers - dense) * (experts * (3 * hidden * expert_ffn + hidden) + shared)
    else:
        mlps *= layers
    layer = 2 * hidden + qkv_rows * hidden + heads * width * hidden
    layer += qkv_rows if family in ("qwen2", "qwen2_moe", "glm4_moe") else 0
    layer += 2 * width if family.startswith("qwen3") or (family == "glm4_moe" and rest[-1]) else 0
    assert layers * layer + mlps + hidden + vocab * hidden * (1 if tied else 2) == published
    assert total_parameters(model) == published
    padding = (padded_vocab_size(model) - vocab) * hidden * (1 if tied else 2)
    names = [parameter for parameter in megatron_names(model) if not parameter.endswith(EXPERT_BIAS)]
    sizes = [torch.Size(megatron_shape(parameter, model)).numel() for parameter in names]
    assert sum(sizes) - padding == published


ONE_OF_EACH = [
    "qwen3-4B",
    "qwen2.5-7B",
    "llama3.2-1B",
    "smollm2-135M",
    *(name for name in EXPERTS if "235B" not in name),
]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_transformers_counts_the_same(name):
    config = published_config(name)
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name][1]


def test_megatron_builds_every_model_with_these_shapes(models):
    """On the meta device: parameter names and shapes of the real GPTModel are those of the bridge's tables.

    Three layers stand for all of them, because the layers of these models are alike, or two kinds of which are.
    """
    assert all(model.num_layers > 3 for model in models.values())
    short = {
        name: dataclasses.replace(model, num_layers=3, moe_layer_freq="1" if alike_layers(model) else "[0,1,1]")
        for name, model in models.items()
    }
    [built] = run_distributed(build_all, 1, short)
    for name, model in short.items():
        assert built[name] == {key: megatron_shape(key, model) for key in megatron_names(model)}, name


def build_all(rank: int, world_size: int, models: dict[str, ModelArgs]) -> dict[str, dict[str, tuple[int, ...]]]:
    from megatron_bridge.model import build_gpt_model, named_weights
    from megatron_bridge.transformer_config import transformer_config

    init_parallel()
    shapes = {}
    for name, model in models.items():
        config = transformer_config(
            model, perform_initialization=False, use_cpu_initialization=True, transformer_impl="local"
        )
        with torch.device("meta"):
            gpt = build_gpt_model(model, config, transformer_impl="local")
        shapes[name] = {global_name(key, model): tuple(value.shape) for key, value in named_weights(gpt)}
    return shapes


def test_a_parent_takes_overrides_and_a_variant_leaves_none_behind(tmp_path):
    assert source("qwen3-4B", tmp_path, before="MODEL_ARGS_ROTARY_BASE=777").rotary_base == 777
    assert source("qwen2.5-32B", tmp_path, before="MODEL_ARGS_NORM_EPSILON=1e-6").norm_epsilon == 1e-6
    both = source("qwen3-4B-Instruct-2507", tmp_path, after=f'source "{SCRIPTS}/qwen3-8B.sh"')
    assert (both.hidden_size, both.rotary_base) == (4096, 1000000)


def test_the_last_of_a_repeated_flag_wins(tmp_path):
    assert source("qwen3-4B", tmp_path, after="MODEL_ARGS+=(--rotary-base 5000000)").rotary_base == 5000000
