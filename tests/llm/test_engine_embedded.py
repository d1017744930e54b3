"""The embedded model writes in the engine what transformers' `generate` writes: greedy, fp32, token for token."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm.load import load_engine
from llm.request import Request, SamplingParams
from llm.scheduler import SchedulerLimits
from tests.llm.embedded import embedded_model

__all__ = ["embedded_model"]

PROMPTS = (
    "Write one sentence about a lighthouse in a storm.",
    "A red ball rolls through the night and",
    "A red ball rolls through the night and finds a friend, who is as blue as the sea. Tell me what they do next.",
)
NUM_TOKENS = 16


@pytest.mark.slow
def test_answers_equal_generate_mixed_and_cached(embedded_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    model = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32).eval()
    prompts = [tuple(tokenizer(text).input_ids) for text in PROMPTS]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS)
        wanted.append([int(token) for token in answer[0, len(prompt) :]])
    engine = load_engine(embedded_model, "cpu", kv_tokens=512, limits=SchedulerLimits(max_step_tokens=24))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    for turn in ("cold", "warm"):
        written: dict[str, list[int]] = {}
        cached = {}
        for number, prompt in enumerate(prompts):
            engine.add_request(Request(f"{turn}{number}", prompt, params))
        while engine.has_work:
            engine.launch()
            for output in engine.collect():
                written.setdefault(output.request_id, []).extend(output.token_ids)
                if output.usage is not None:
                    cached[output.request_id] = output.usage.cached_tokens
        for number, tokens in enumerate(wanted):
            ends = [token for token in tokens if token in engine.eos_token_ids]
            assert written[f"{turn}{number}"] == tokens[: len(tokens) - len(ends)]
        if turn == "warm":
            assert [cached[f"warm{number}"] for number in range(3)] == [
                (len(prompt) - 1) // 16 * 16 for prompt in prompts
            ]
