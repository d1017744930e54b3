"""From a GGUF file to a transformers folder: config, bf16 safetensors, tokenizer, chat template.

Source: the GGUF specification, version 3 (ggml/docs/gguf.md), and llama.cpp's conversion of Llama checkpoints, which
permutes the rows of q and k from transformers' halves to interleaved pairs.
Invariants: the folder appears whole or not at all; quantised tensors are dequantised in fp32 and rounded once to bf16.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from llm.errors import CheckpointError, UnsupportedModel

_LAYER_NAMES = {
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
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert_gguf(source: Path, folder: Path, card: dict[str, Any]) -> None:
    """Write `folder` from the GGUF file `source`, at once: a temporary sibling is renamed when it is complete.

    `card` is written as card.json, with the hashes of the weights and of the source added.

    Raises:
        CheckpointError: the file cannot be read.
        UnsupportedModel: its architecture, tokenizer or a tensor is not one that is converted here.
    """
    try:
        reader = GGUFReader(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"convert_gguf: {source.name} is not a readable GGUF file: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        weights = partial / "model.safetensors"
        save_file(_state_dict(reader, config), weights, metadata={"format": "pt"})
        _tokenizer(fields).save(str(partial / "tokenizer.json"))
        (partial / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
        names = {name: fields["tokenizer.ggml.tokens"][config[f"{name}_id"]] for name in ("bos_token", "eos_token")}
        _write_json(partial / "config.json", config)
        _write_json(partial / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
        token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(partial / "generation_config.json", token_ids)
        weights.chmod(0o644)
        weights_hash = f"sha256:{_sha256(weights)}"
        _write_json(partial / "card.json", {**card, "hash": weights_hash, "origin_sha256": _sha256(source)})
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    if (architecture := fields["general.architecture"]) != "llama":
        raise UnsupportedModel(f"convert_gguf: the architecture must be llama, got {architecture!r}")
    if scaling := [name for name in fields if name.startswith("llama.rope.scaling")]:
        raise UnsupportedModel(f"convert_gguf: scaled rotary embeddings are not converted: {', '.join(scaling)}")
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        # the file carries the fp32 value nearest to the true one, 1e-5
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _state_dict(reader: GGUFReader, config: dict[str, Any]) -> dict[str, Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    state: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        # "blk.<layer>.<part>.weight" or "<part>.weight"
        parts = tensor.name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES and parts[3] == "weight":
            name = f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
        elif len(parts) == 2 and parts[0] in _TOP_NAMES and parts[1] == "weight":
            name = f"{_TOP_NAMES[parts[0]]}.weight"
        else:
            raise UnsupportedModel(f"convert_gguf: the tensor {tensor.name} is not part of a Llama checkpoint")
        values = dequantize(tensor.data, tensor.tensor_type)
        if len(parts) == 4 and parts[2] in heads:
            values = _unpermute(values, heads[parts[2]])
        state[name] = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
    config["tie_word_embeddings"] = "lm_head.weight" not in state
    return state


def _unpermute(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Turn rows from interleaved pairs (llama.cpp) to two halves (transformers). `weight` is [H * D, in]."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Rebuild the byte-level BPE; the `smollm` rule also splits numbers into single digits."""
    kind, rule = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if (kind, rule) != ("gpt2", "smollm"):
        raise UnsupportedModel(f"convert_gguf: the tokenizer must be gpt2 with rule smollm, got {kind} with {rule}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == TokenType.CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
