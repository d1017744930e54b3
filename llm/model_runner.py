"""The model on its device: loads a transformers folder offline, checks it, and runs one packed batch a step.

A model is probed with one token, which shows what each layer stores; then a short text is run in pieces, and what comes
out must be what the model's own attention gives, or the model is refused: an answer is never computed wrongly.
"""

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from llm.attention import NAME, Probe, Step, pack, plan
from llm.chunk import Chunk, tiles
from llm.errors import CheckpointError, UnsupportedModel
from llm.invariant import EXPERTS, InvariantRows, rows_for
from llm.kv_cache import BLOCK_SIZE, KvCache, LayerSpec, PrefixHit, Traffic
from llm.latent_attention import page_latents
from llm.memory import free_memory_bytes, plan_kv_tokens

logger = logging.getLogger(__name__)

# 2026-11, AMD EPYC (AVX2), one thread, SmolLM2-135M: fp32 prefills 9 times faster than bf16 (284 against 31 tokens/s)
# and decodes 8 sequences 5 times faster (54 against 10); alone bf16 decodes 1.2 times faster (16 against 13).
CPU_DTYPE = torch.float32
GPU_DTYPE = torch.bfloat16
# factors of these depend on the longest position in the batch, so an answer would depend on its neighbours
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_LAYER_KINDS = {"full_attention", "sliding_attention"}
_CHECK_TOKENS = 12
# as many rows as a step has
_NEIGHBOUR_TOKENS = 96
# largest difference of the check's logits, in standard deviations: rounding of another order of sums, no more
_CHECK_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


class ModelRunner:
    """A causal language model with its blocks of keys and values."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv_tokens: int | None = None,
        *,
        max_kv_tokens: int | None = None,
        block_size: int = BLOCK_SIZE,
        traffic: Traffic | None = None,
        is_invariant: bool = False,
        invariant_rows: InvariantRows | None = None,
    ) -> None:
        """Prepare a model.

        Args:
            kv_tokens: token places for all sequences together; None: what memory holds, at most `max_kv_tokens`.
            block_size: tokens a block, one of the kernels' page sizes.
            traffic: what layers with a window are sized for; None: as many places as the others have.
            is_invariant: give a token's logits the same bits in any batch (`llm.invariant`), at a price.
            invariant_rows: how steps are padded then; None: what suits the device.

        Raises UnsupportedModel if the architecture would be computed wrongly.
        """
        _check_supported(model)
        model.train(False)
        self.model = model
        self.device = model.device
        self.vocab_size = int(model.lm_head.weight.shape[0])
        self.context_length = int(model.config.get_text_config().max_position_embeddings)
        self.rows: InvariantRows | None = None
        # which text it is does not matter, that its tokens differ does
        self._check_ids = [(7 * index + 3) % self.vocab_size for index in range(_CHECK_TOKENS)]
        # of transformers' own attentions the plain one knows windows, soft caps and sinks
        model.set_attn_implementation("eager")
        expected = self._own_logits()
        model.set_attn_implementation(NAME)
        page_latents(model)
        if is_invariant and getattr(model.config, "_experts_implementation", None) is not None:
            model.set_experts_implementation(EXPERTS)
        specs = self._probe()
        if kv_tokens is None:
            kv_tokens = plan_kv_tokens(model, specs, free_memory_bytes(self.device), block_size, traffic)
            kv_tokens = kv_tokens if max_kv_tokens is None else min(kv_tokens, max_kv_tokens)
        self.kv_cache = KvCache(
            specs, kv_tokens, dtype=model.dtype, device=self.device, block_size=block_size, traffic=traffic
        )
        self._check_answers(expected)
        if is_invariant:
            self._choose_rows((invariant_rows,) if invariant_rows is not None else rows_for(self.device))

    @property
    def is_invariant(self) -> bool:
        """Whether a token's logits have the same bits in any batch."""
        return self.rows is not None

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], fed: Tensor | None = None, *, is_reference: bool = False) -> Tensor:
        """Run one step.

        Args:
            fed: [B'] int64, the tokens that the step before has drawn, on the device.
            is_reference: attend in plain torch, whatever the device: slow, and right where a kernel is not.

        Returns: logits [B, V] fp32 after the last token of each chunk that wants them, in their order.
        """
        if self.rows is None or self.rows.tile is None:
            return self._forward_tile(chunks, fed, is_reference)
        return torch.cat([self._forward_tile(tile, fed, is_reference) for tile in tiles(chunks, self.rows.tile)])

    def _forward_tile(self, chunks: Sequence[Chunk], fed: Tensor | None, is_reference: bool) -> Tensor:
        token_ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        fed_places: list[int] = []
        fed_rows: list[int] = []
        for chunk in chunks:
            token_ids.extend(chunk.token_ids)
            if chunk.fed_row is not None:
                fed_places.append(len(token_ids))
                fed_rows.append(chunk.fed_row)
                token_ids.append(0)
            positions.extend(range(chunk.past, chunk.past + chunk.length))
            if chunk.wants_logits:
                wanted.append(len(token_ids) - 1)
        num_wanted, num_padding = len(wanted), 0
        if self.rows is not None:
            num_padding = self.rows.num_padding(len(token_ids))
            token_ids += [0] * num_padding
            positions += [0] * num_padding
            wanted += [0] * self.rows.num_padding(num_wanted)
        input_ids = torch.tensor(token_ids, device=self.device)
        if fed_rows:
            assert fed is not None
            input_ids[torch.tensor(fed_places, device=self.device)] = fed[torch.tensor(fed_rows, device=self.device)]
        logits = self._run(
            input_ids,
            torch.tensor(positions, device=self.device),
            self._step(chunks, num_padding, is_reference),
            # an empty index would be read as "all"
            torch.tensor(wanted or [0], device=self.device),
        )
        return logits[:num_wanted]

    def _step(self, chunks: Sequence[Chunk], num_padding: int, is_reference: bool) -> Step:
        tables = [chunk.blocks.tables for chunk in chunks]
        starts, lengths = [chunk.past for chunk in chunks], [chunk.length for chunk in chunks]
        if self.device.type == "cpu" and not is_reference:
            return plan(self.kv_cache, tables, starts, lengths, num_padding, is_by_row=self.is_invariant)
        return pack(
            self.kv_cache,
            tables,
            starts,
            lengths,
            self.device,
            num_padding=num_padding,
            is_invariant=self.is_invariant,
            is_reference=is_reference,
        )

    def _run(self, input_ids: Tensor, positions: Tensor, step: Step | Probe, wanted: Tensor) -> Tensor:
        """Run the model on packed tokens [N]; gives logits [B, V] fp32 at the wanted places [B]."""
        output = self.model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=wanted,
            step_batch=step,
        )
        logits: Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def _own_logits(self) -> Tensor:
        """What the model itself says of the check's text: [N, V] fp32."""
        input_ids = torch.tensor([self._check_ids], device=self.device)
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits[0].float()
        return logits

    @torch.inference_mode()
    def _probe(self) -> list[LayerSpec]:
        """Run one token to learn what each layer stores."""
        name = type(self.model).__name__
        probe = Probe()
        place = torch.zeros(1, dtype=torch.int64, device=self.device)
        logits = self._run(place, place, probe, place)
        config: Any = self.model.config.get_text_config()
        if not probe.specs:
            raise UnsupportedModel(f"{name}: its attention does not use the attention interface")
        if sorted(probe.specs) != list(range(int(config.num_hidden_layers))):
            raise UnsupportedModel(
                f"{name}: of its {config.num_hidden_layers} layers {len(probe.specs)} use the attention interface"
            )
        if logits.shape != (1, self.vocab_size):
            raise UnsupportedModel(f"{name}: logits are {list(logits.shape)}, expected one row")
        specs = [probe.specs[layer] for layer in range(len(probe.specs))]
        for spec, kind in zip(specs, getattr(config, "layer_types", None) or (), strict=False):
            if (kind == "sliding_attention") != (spec.window is not None):
                raise UnsupportedModel(f"{name}: a layer of kind {kind} attends with the window {spec.window}")
        return specs

    def _check_answers(self, expected: Tensor) -> None:
        """Compare a text run in two pieces, beside another sequence, with what the model itself says of it.

        Args:
            expected: [N, V] fp32.
        """
        none = PrefixHit(0, [[] for _ in self.kv_cache.groups])
        first, cut, size = self._check_ids, 5, self.kv_cache.block_size
        blocks = [self.kv_cache.begin(name, none) for name in ("check", "neighbour")]
        room = self.kv_cache.num_tokens >= 2 * size
        for item in blocks[: 1 + room]:
            assert self.kv_cache.grow(item, 0, _CHECK_TOKENS)
        pieces = [Chunk(first[:cut], 0, blocks[0], wants_logits=True)]
        if room:
            pieces.append(Chunk(first[cut:], 0, blocks[1], wants_logits=False))
        early = self.forward(pieces)
        late = self.forward([Chunk(first[cut:], cut, blocks[0], wants_logits=True)])
        for name in ("check", "neighbour"):
            self.kv_cache.free(name)
        got = torch.cat([early, late])
        wanted = expected[[cut - 1, _CHECK_TOKENS - 1]]
        spread = float(wanted.std())
        difference = float((got - wanted).abs().max()) / (spread or 1.0)
        if not difference <= _CHECK_TOLERANCE[self.model.dtype]:
            raise UnsupportedModel(
                f"{type(self.model).__name__}: paged attention gives other logits than the model's own "
                f"(by {difference:.3g} standard deviations)"
            )
        logger.debug("%s: paged logits differ by %.2g standard deviations", type(self.model).__name__, difference)

    def _choose_rows(self, choices: Sequence[InvariantRows]) -> None:
        """Take the first way to pad steps that gives the same bits. Raises UnsupportedModel if none does."""
        for rows in choices:
            self.rows = rows
            if self._has_same_bits():
                logger.debug("%s: invariant with %s", type(self.model).__name__, rows)
                return
        name, device = type(self.model).__name__, self.device
        raise UnsupportedModel(f"{name}: invariant mode does not give the same bits in every batch on {device}")

    def _has_same_bits(self) -> bool:
        """Whether a text run whole, token for token, and in two pieces behind another has the same last logits."""
        none = PrefixHit(0, [[] for _ in self.kv_cache.groups])
        ids, found = self._check_ids, []
        num_neighbour = min(_NEIGHBOUR_TOKENS, self.kv_cache.num_tokens - self.kv_cache.block_size)
        for cuts, num_beside in (((), 0), (tuple(range(1, _CHECK_TOKENS)), 0), ((5,), num_neighbour)):
            text, other = (self.kv_cache.begin(name, none) for name in ("check", "neighbour"))
            assert self.kv_cache.grow(text, 0, _CHECK_TOKENS)
            logits = torch.empty(0)
            for start, stop in itertools.pairwise((0, *cuts, _CHECK_TOKENS)):
                pieces = [Chunk(ids[start:stop], start, text, wants_logits=True)]
                if num_beside > 0 and self.kv_cache.grow(other, 0, num_beside):
                    tokens = [ids[index % _CHECK_TOKENS] for index in range(num_beside)]
                    pieces.insert(0, Chunk(tokens, 0, other, wants_logits=True))
                logits = self.forward(pieces)[-1]
            found.append(logits)
            for name in ("check", "neighbour"):
                self.kv_cache.free(name)
        return all(torch.equal(found[0], logits) for logits in found[1:])


def load_model(folder: Path, device: str) -> PreTrainedModel:
    """Load a transformers folder, safetensors only, without the network, in the dtype that suits the device.

    Raises CheckpointError if the folder is not a complete checkpoint.
    """
    dtype = GPU_DTYPE if device.startswith("cuda") else CPU_DTYPE
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder.name} is not a checkpoint that transformers loads: {error}") from error
    assert isinstance(model, PreTrainedModel)
    # the parameters are moved in place; transformers' own wrapper of `to` carries no types
    nn.Module.to(model, device)
    return model


def _check_supported(model: PreTrainedModel) -> None:
    config: Any = model.config.get_text_config()
    name = type(model).__name__
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    if stateful := sorted(kinds - _LAYER_KINDS):
        raise UnsupportedModel(f"{name}: layers of kind {', '.join(stateful)} keep a state that is not held here")
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    if dependent := {str(part.get("rope_type")) for part in parts}.intersection(_BATCH_DEPENDENT_ROPE):
        raise UnsupportedModel(f"{name}: rope type {', '.join(dependent)} makes answers depend on the batch")
    if not any(isinstance(module, nn.Module) and hasattr(module, "layer_idx") for module in model.modules()):
        raise UnsupportedModel(f"{name}: its attention layers are not numbered")
