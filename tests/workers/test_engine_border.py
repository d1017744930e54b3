"""The border to the engine: every field of a request arrives under its own name."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from llm.request import FinishReason, Output, SamplingParams
from llm.request import Usage as EngineUsage
from media_server.text.answers import Answer, Whole
from media_server.text.messages import Generate, RequestMeta, Sampling, Usage
from media_server.text.requests import ChatRequest, sampling_of
from workers.engine_border import to_event, to_request

ASKED: dict[str, Any] = {
    "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.6,
    "seed": 11, "n": 2, "stop": ["end"], "stop_token_ids": [5], "ignore_eos": True, "logit_bias": {3: 1.5},
    "frequency_penalty": 0.25, "presence_penalty": 0.75, "repetition_penalty": 1.25, "collapse_guard": True,
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


def test_a_collapse_is_cut_short_in_openais_words_and_named_in_ours() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    output = Output("r", 0, "so", (5, 6), finish_reason=FinishReason.COLLAPSE, usage=EngineUsage(1, 2))
    event = to_event(output, SimpleNamespace(), usage)  # type: ignore[arg-type]
    answer = Answer(id="chatcmpl_1", created=0, model="m", fingerprint="f")
    end = answer.chunks(event)[-1]["choices"][0]
    whole = Whole(answer)
    whole.take(event)
    for choice in (end, whole.body()["choices"][0]):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "collapse")
    plain = to_event(Output("r", 0, "so", (5,), finish_reason=FinishReason.LENGTH), SimpleNamespace(), usage)  # type: ignore[arg-type]
    whole.take(plain)
    assert "stop_reason" not in whole.body()["choices"][0] | answer.chunks(plain)[-1]["choices"][0]
