"""Multi-head latent attention with the latents paged: what DeepSeek-V3's attention computes, in absorbed form.

transformers' code expands each token's latent to keys and values of every head before it calls the attention
interface. Here the latent itself is stored (`kv_lora_rank` + `qk_rope_head_dim` columns for all heads together, 576 in
DeepSeek-V3) and the two halves of `kv_b_proj` are applied to queries and outputs instead (arXiv 2405.04434, 2.1.2):
q · (W_k c) = (W_k^T q) · c, and sum of w (W_v c) = W_v (sum of w c).
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3

from llm.attention import Probe, Step, attend, layer_index
from llm.kv_cache import LayerSpec


def page_latents(model: nn.Module) -> int:
    """Let every DeepSeek-V3 attention of a model store latents; returns how many there are."""
    modules: list[Any] = [module for module in model.modules() if type(module) is deepseek_v3.DeepseekV3Attention]
    for module in modules:
        module.forward = MethodType(latent_attention, module)
    return len(modules)


def latent_attention(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    step_batch: Step | Probe | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend from `hidden_states` [1, N, C] over paged latents; gives [1, N, C]."""
    assert step_batch is not None, "latent attention runs inside the engine only"
    rank, rope, nope = module.kv_lora_rank, module.qk_rope_head_dim, module.qk_nope_head_dim
    layer, num_tokens = layer_index(module), hidden_states.shape[1]
    if isinstance(step_batch, Probe):
        step_batch.specs[layer] = LayerSpec(1, rank + rope, rank, is_latent=True)
        return torch.zeros_like(hidden_states), None
    if module.q_lora_rank is None:
        queries = module.q_proj(hidden_states)
    else:
        queries = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
    # [1, N, H * (nope + rope)] -> [1, H, N, nope + rope]
    queries = queries.view(1, num_tokens, -1, nope + rope).transpose(1, 2)
    q_nope, q_rope = queries.split([nope, rope], dim=-1)
    latent, k_rope = module.kv_a_proj_with_mqa(hidden_states).split([rank, rope], dim=-1)
    latent = module.kv_a_layernorm(latent)
    rotate: Any = (
        deepseek_v3.apply_rotary_pos_emb_interleave
        if module.config.rope_interleave
        else deepseek_v3.apply_rotary_pos_emb
    )
    q_rope, k_rope = rotate(q_rope, k_rope.view(1, 1, num_tokens, rope), *position_embeddings)
    # [H, nope + D', rank]
    expand = module.kv_b_proj.weight.view(module.num_heads, nope + module.v_head_dim, rank)
    to_keys, to_values = expand.split([nope, module.v_head_dim], dim=1)
    # [H, N, nope] @ [H, nope, rank]
    q_latent = torch.cat((q_nope[0] @ to_keys, q_rope[0]), dim=-1).transpose(0, 1)
    key = torch.cat((latent[0], k_rope[0, 0]), dim=-1).unsqueeze(1)
    attended = attend(step_batch, layer, q_latent.contiguous(), key, None, scale=module.scaling)
    # [H, N, rank] @ [H, rank, D'] -> [1, N, H * D']
    output = (attended.transpose(0, 1) @ to_values.transpose(1, 2)).transpose(0, 1).flatten(1).unsqueeze(0)
    return module.o_proj(output), None
