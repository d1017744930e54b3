"""Conversion from GGUF: equal to transformers' own reading of the same file, atomic, refused by name otherwise."""

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm.checkpoints import embedded
from llm.checkpoints import gguf as converter
from llm.checkpoints.embedded import ensure_embedded
from llm.checkpoints.gguf import convert_gguf
from llm.errors import CheckpointError, UnsupportedModel
from llm.load import load_engine
from llm.request import Request, SamplingParams
from tests.llm.embedded import embedded_model

__all__ = ["embedded_model"]

HIDDEN, FEED, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
TEXTS = ("Hello world 1234", "<|im_start|>user\nWhat is 12%?<|im_end|>\n", "naïve 日本 🎬  spaces")


def write_gguf(path: Path, architecture: str = "llama") -> None:
    """A Llama of two layers, Q4_1, Q8_0 and F32, with random weights and a byte vocabulary."""
    from tokenizers import pre_tokenizers

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")

    def add(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> None:
        values = rng.normal(0, 0.3, shape).astype(np.float32)
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    f32, q4, q8 = (getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "Q4_1", "Q8_0"))
    add("token_embd.weight", (len(tokens), HIDDEN), q8)
    add("output_norm.weight", (HIDDEN,), f32)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", (HIDDEN,), f32)
        add(f"blk.{layer}.ffn_norm.weight", (HIDDEN,), f32)
        add(f"blk.{layer}.attn_q.weight", (HIDDEN, HIDDEN), q4)
        add(f"blk.{layer}.attn_k.weight", (HIDDEN * KV_HEADS // HEADS, HIDDEN), q4)
        add(f"blk.{layer}.attn_v.weight", (HIDDEN * KV_HEADS // HEADS, HIDDEN), q4)
        add(f"blk.{layer}.attn_output.weight", (HIDDEN, HIDDEN), q4)
        add(f"blk.{layer}.ffn_gate.weight", (FEED, HIDDEN), q4)
        add(f"blk.{layer}.ffn_up.weight", (FEED, HIDDEN), q4)
        add(f"blk.{layer}.ffn_down.weight", (HIDDEN, FEED), q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_equal_to_transformers(source: Path, folder: Path) -> None:
    """Compare weights, tokens and configuration with what transformers itself reads from the GGUF file."""
    reference = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    ours = load_file(folder / "model.safetensors")
    wanted = reference.state_dict()
    assert set(wanted) - {"lm_head.weight"} == set(ours)
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, wanted[name].bfloat16()), name
    config = json.loads((folder / "config.json").read_text())
    theirs: dict[str, Any] = reference.config.to_dict()
    for name in set(config) - {"architectures", "dtype", "rms_norm_eps"}:
        assert config[name] == theirs[name], name
    assert config["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"], rel=1e-6)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference_tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert ids == reference_tokenizer(text, add_special_tokens=False).input_ids


def test_a_small_file_converts_as_transformers_reads_it(tmp_path: Path) -> None:
    source, folder = tmp_path / "tiny.gguf", tmp_path / "models" / "tiny"
    write_gguf(source)
    convert_gguf(source, folder, {"v": 1, "name": "tiny"})
    assert_equal_to_transformers(source, folder)
    # nothing is left of the temporary folder
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    card = json.loads((folder / "card.json").read_text())
    assert card["name"] == "tiny"
    assert card["hash"].startswith("sha256:")
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_the_converted_folder_runs_in_the_engine(tmp_path: Path) -> None:
    source, folder = tmp_path / "tiny.gguf", tmp_path / "tiny"
    write_gguf(source)
    convert_gguf(source, folder, {})
    engine = load_engine(folder, "cpu", kv_tokens=64)
    assert engine.eos_token_ids == (2,)
    engine.add_request(Request("a", (3, 4, 5), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)))
    count = 0
    while engine.has_work:
        engine.launch()
        count += sum(len(output.token_ids) for output in engine.collect())
    assert count == 5


def test_other_files_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "x"
    with pytest.raises(CheckpointError, match="not a readable GGUF"):
        (tmp_path / "noise.gguf").write_bytes(b"not a model at all" * 10)
        convert_gguf(tmp_path / "noise.gguf", folder, {})
    with pytest.raises(UnsupportedModel, match="must be llama, got 'qwen2'"):
        write_gguf(tmp_path / "other.gguf", "qwen2")
        convert_gguf(tmp_path / "other.gguf", folder, {})
    assert not folder.exists()


def test_another_converter_makes_the_embedded_model_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, folder = tmp_path / "tiny.gguf", tmp_path / "models" / "tiny"
    write_gguf(source)
    monkeypatch.setattr(embedded, "find_file", lambda: source)
    ensure_embedded(folder)
    template = folder / "chat_template.jinja"
    template.write_text("what a converter before wrote")
    with template.open() as held:
        ensure_embedded(folder)
        assert template.read_text() == "what a converter before wrote"
        # a line of the converter's source is another
        changed = tmp_path / "gguf.py"
        changed.write_bytes(Path(converter.__file__).read_bytes() + b"#")
        monkeypatch.setattr(converter, "__file__", str(changed))
        assert not embedded.is_current(folder)
        ensure_embedded(folder)
        assert template.read_text() == "{{ messages[0].content }}"
        assert held.read() == "what a converter before wrote"
    assert embedded.is_current(folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".tiny.lock", "tiny"]


def test_a_conversion_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "card.json").write_text("{}")
    (tmp_path / "noise.gguf").write_bytes(b"noise")
    monkeypatch.setattr(embedded, "find_file", lambda: tmp_path / "noise.gguf")
    with pytest.raises(CheckpointError, match="not a readable GGUF"):
        ensure_embedded(folder)
    assert (folder / "card.json").read_text() == "{}"


@pytest.mark.slow
def test_the_embedded_model_is_the_one_that_transformers_reads(embedded_model: Path) -> None:
    # 2026-11: transformers 5.24's own reading of the file (31 CPU seconds), rounded to bf16, has this digest
    wanted = "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"
    weights = load_file(embedded_model / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == wanted
    before = (embedded_model / "model.safetensors").stat().st_mtime_ns
    ensure_embedded(embedded_model)
    assert (embedded_model / "model.safetensors").stat().st_mtime_ns == before
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    # the ids that transformers' reading gives
    assert tokenizer.encode(TEXTS[0]).ids == [19556, 905, 216, 33, 34, 35, 36]
    assert tokenizer.encode(TEXTS[1]).ids == [1, 4093, 198, 1780, 314, 216, 33, 34, 21, 47, 2, 198]
