"""Tiny random models and a byte tokenizer, so that the engine is tested without weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from llguidance import LLTokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from llm.engine import Engine
from llm.model_runner import ModelRunner
from llm.request import Output
from llm.scheduler import SchedulerLimits
from tests.llm.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 257,
    "eos_token_id": EOS,
    "pad_token_id": 258,
    # large enough that the likeliest token is far ahead of the second
    "initializer_range": 0.3,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Qwen3Moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "Mistral": {"sliding_window": 7},
    "Gemma3Text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma2": {"sliding_window": 6, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "Phi": {"resid_pdrop": 0.0},
    "Phi3": {"resid_pdrop": 0.0},
    "Glm": {},
    "GptOss": {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _ROPE},
    "DeepseekV3": {
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
}


def tiny_model(architecture: str = "Llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of two layers in fp32."""
    config_class = getattr(transformers, f"{architecture}Config")
    model_class = getattr(transformers, f"{architecture.removesuffix('Text')}ForCausalLM")
    torch.manual_seed(seed)
    config = config_class(**{**_SHARED, **ARCHITECTURES.get(architecture, {}), **changes})
    model: PreTrainedModel = model_class(config).eval()
    for name, parameter in model.named_parameters():
        # ones and zeros at first: as if they were not there
        if name.endswith((".sinks", "norm.weight")):
            torch.nn.init.normal_(parameter.detach(), 0.8, 0.3)
    return model


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def ll_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    return LLTokenizer(tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS])


@pytest.fixture
def make_engine(ll_tokenizer: LLTokenizer) -> Callable[..., Engine]:
    def make(model: PreTrainedModel | None = None, kv_tokens: int = 1024, **limits: int) -> Engine:
        runner = ModelRunner(model or tiny_model(), kv_tokens)
        return Engine(runner, ll_tokenizer, (EOS,), SchedulerLimits(**limits))

    return make


@pytest.fixture
def run_all() -> Callable[[Engine], dict[str, list[Output]]]:
    """Run until the engine is idle; gives the outputs by request id, "/i" added for the later of n answers."""

    def run(engine: Engine) -> dict[str, list[Output]]:
        outputs: dict[str, list[Output]] = {}
        while engine.has_work:
            engine.launch()
            for output in engine.collect():
                name = output.request_id + (f"/{output.index}" if output.index else "")
                outputs.setdefault(name, []).append(output)
        return outputs

    return run


@pytest.fixture(scope="session", name="tiny_model")
def tiny_model_fixture() -> Callable[..., PreTrainedModel]:
    return tiny_model
