"""The border to the engine: every field of a request arrives under its own name."""

from dataclasses import fields
from typing import Any

from llm.request import SamplingParams
from media_server.text.messages import Generate, RequestMeta, Sampling
from media_server.text.requests import ChatRequest, sampling_of
from workers.engine_border import to_request

ASKED: dict[str, Any] = {
    "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.6,
    "seed": 11, "n": 2, "stop": ["end"], "stop_token_ids": [5], "ignore_eos": True, "logit_bias": {3: 1.5},
    "frequency_penalty": 0.25, "presence_penalty": 0.75, "repetition_penalty": 1.25,
}  # fmt: skip


def test_every_sampling_field_goes_from_the_body_to_the_engine() -> None:
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hello"}], **ASKED})
    sampling = sampling_of(body, longest=7, num_logprobs=4, seed=0, defaults={"temperature": 1.0, "top_p": 1.0})
    message = Generate(
        id="req_1",
        deadline=0,
        model="m",
        prompt_token_ids=[1],
        sampling=sampling,
        meta=RequestMeta(engine="e", instance="i", model="m", created=0),
    )
    got = to_request(message).sampling
    assert got == SamplingParams(**{**ASKED, "stop": ("end",), "stop_token_ids": (5,), "logprobs": 4})
    # none was left at its default, and none is unknown on either side
    plain = SamplingParams()
    assert all(getattr(got, field.name) != getattr(plain, field.name) for field in fields(SamplingParams))
    assert set(Sampling.model_fields) == {field.name for field in fields(SamplingParams)}
