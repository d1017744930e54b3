"""/v1/chat/completions and /v1/completions: text, whole or as it is written, by our engine or one by URL.

A client that leaves ends its request, unless it asked for `resume_s`: then the request goes on, and its stream can be
taken up again at /v1/chat/completions/{id}/events with Last-Event-ID.
"""

import secrets
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from media_server.auth import Caller, Owner
from media_server.errors import InvalidRequest, NotFound
from media_server.http_body import read_json
from media_server.http_context import request_context
from media_server.http_openapi import errors
from media_server.http_requests import parse_body
from media_server.http_text import answer_prompt, load_text_model, stored_answer
from media_server.ids import new_id
from media_server.models.card import TextCard
from media_server.settings import Settings
from media_server.text import remote, remote_writing
from media_server.text.answers import Answer, ChatCompletion, Completion
from media_server.text.engine import AsyncEngineClient, Prompt
from media_server.text.metering import open_meter
from media_server.text.openapi import json_body, stream_response
from media_server.text.requests import (
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    grammar_of,
    refuse_unsupported,
    sampling_of,
)
from media_server.text.slots import HOLD_S
from media_server.text.sse import HEADERS, MEDIA_TYPE, event_number, frames, until_stopped
from media_server.text.templates import TextModel

router = APIRouter(tags=["chat"])

_STREAM = stream_response("The answer, or with `stream` its chunks as server-sent events, the last one `[DONE]`.")


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    summary="Answer a conversation",
    responses={**_STREAM, **errors(404, 422)},
    openapi_extra=json_body(ChatRequest),
)
async def create_chat_completion(request: Request, owner: Owner) -> Response:
    """Answer a conversation: OpenAI's shapes, plain or as server-sent events whose ids a stream is taken up by."""
    values = refuse_unsupported(await read_json(request))
    body = parse_body(ChatRequest, values)
    settings: Settings = request.app.state.settings
    if settings.engine_url is not None:
        return await _forward(request, owner, "chat/completions", body, values)
    model = await load_text_model(request, body.model)
    token_ids = await run_in_threadpool(model.encode_chat, [message.flat() for message in body.messages])
    answer = Answer(
        id=new_id("chatcmpl"),
        created=0,
        model=model.card.name,
        fingerprint=_fingerprint(model.card),
        num_choices=body.n,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        has_logprobs=body.logprobs,
        is_resumable=body.resume_s is not None,
    )
    prompt = _prompt(request, owner, body, model, token_ids, answer, body.longest, body.num_logprobs)
    meter = await open_meter(request.app.state, owner, body.label, prompt.model, prompt.id)
    meter.prompt_tokens = len(token_ids)
    return await answer_prompt(request, body, prompt, meter)


@router.post(
    "/v1/completions",
    response_model=Completion,
    summary="Continue a text",
    responses={**_STREAM, **errors(404, 422)},
    openapi_extra=json_body(CompletionRequest),
)
async def create_completion(request: Request, owner: Owner) -> Response:
    """Continue a text or a list of token ids, without a chat template."""
    values = refuse_unsupported(await read_json(request))
    body = parse_body(CompletionRequest, values)
    settings: Settings = request.app.state.settings
    if settings.engine_url is not None:
        return await _forward(request, owner, "completions", body, values)
    model = await load_text_model(request, body.model)
    if isinstance(body.prompt, str):
        token_ids = await run_in_threadpool(model.encode_text, body.prompt)
    else:
        token_ids = body.prompt
    if not token_ids:
        raise InvalidRequest("prompt: must have at least one token.", param="prompt", rule="at least one token")
    answer = Answer(
        id=new_id("req"),
        created=0,
        model=model.card.name,
        fingerprint=_fingerprint(model.card),
        kind="completion",
        num_choices=body.n,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        has_logprobs=body.logprobs is not None,
        is_resumable=body.resume_s is not None,
    )
    prompt = _prompt(request, owner, body, model, token_ids, answer, body.longest, body.logprobs)
    meter = await open_meter(request.app.state, owner, body.label, prompt.model, prompt.id)
    meter.prompt_tokens = len(token_ids)
    return await answer_prompt(request, body, prompt, meter)


@router.get(
    "/v1/chat/completions/{completion_id}/events",
    summary="Take up a stream again",
    response_class=Response,
    responses={**stream_response("The chunks after Last-Event-ID."), **errors(404)},
)
async def completion_events(
    request: Request,
    owner: Owner,
    completion_id: Annotated[str, Path(max_length=80, description="The id of a completion sent with `resume_s`.")],
    last_event_id: Annotated[str | None, Header(description="The id of the last frame that was seen.")] = None,
) -> Response:
    """Go on with the stream of a request that asked for `resume_s`, from the event after Last-Event-ID."""
    after = event_number(last_event_id)
    if after is None:
        raise InvalidRequest(
            "last-event-id: must be the id of a frame of this stream.",
            param="last-event-id",
            rule="an id such as 12-0",
            value=(last_event_id or "")[:40],
        )
    client = AsyncEngineClient(request.app.state.redis)
    reading = await client.resume(completion_id, after)
    if reading is None or not owner.may_see(reading.meta.owner_key_id) or not reading.meta.answer["is_resumable"]:
        raise NotFound(
            f"No stream is kept under the id {completion_id!r}: only requests with resume_s are, for that long.",
            param="completion_id",
            value=completion_id,
        )
    entries = until_stopped(client.events(reading), reading, request.app.state.stopping)
    return StreamingResponse(frames(stored_answer(reading), entries), headers=HEADERS, media_type=MEDIA_TYPE)


def _prompt(
    request: Request,
    owner: Caller,
    body: SamplingFields,
    model: TextModel,
    token_ids: list[int],
    answer: Answer,
    longest: int | None,
    num_logprobs: int | None,
) -> Prompt:
    card = model.card
    longest_resume_s = request.app.state.settings.resume_s
    if body.resume_s is not None and body.resume_s > longest_resume_s:
        raise InvalidRequest(
            f"resume_s: streams are kept for {longest_resume_s:g} s at most here, got {body.resume_s:g}.",
            param="resume_s",
            rule=f"at most {longest_resume_s:g}",
            value=body.resume_s,
        )
    is_forgotten = owner.answer_s(request.app.state.settings) is not None
    if body.resume_s is not None and is_forgotten:
        raise InvalidRequest(
            "resume_s: no words are kept here, and a stream that can be taken up again is kept.",
            code="zero_retention",
            param="resume_s",
            rule="leave it out",
        )
    room = card.context_length - len(token_ids)
    if longest is None and room > 0:
        # the model's own default, as far as the context goes; what was asked for is never shortened
        longest = min(card.defaults.max_tokens or room, room)
    defaults = {"temperature": card.defaults.temperature, "top_p": card.defaults.top_p}
    return Prompt(
        id=answer.id,
        model=card.name,
        token_ids=token_ids,
        sampling=sampling_of(
            body, longest=longest, num_logprobs=num_logprobs, seed=secrets.randbits(63), defaults=defaults
        ),
        grammar=grammar_of(body),
        resume_s=body.resume_s,
        priority=body.priority,
        trace=request_context(request).traceparent,
        owner_key_id=owner.owner_key_id,
        answer=asdict(answer),
        is_forgotten=is_forgotten,
    )


async def _forward(
    request: Request, owner: Caller, path: str, body: SamplingFields, values: Mapping[str, Any]
) -> Response:
    state = request.app.state
    hold_s = remote_writing.TIMEOUT.read or HOLD_S
    meter = await open_meter(state, owner, body.label, body.model or "", new_id("req"), hold_s=hold_s)
    trace = request_context(request).traceparent if state.tracing.is_on else None
    return await remote.forward(state.settings, path, body, values, meter, state.stopping, traceparent=trace)


def _fingerprint(card: TextCard) -> str:
    return f"media-server-{version('media-server')}-{card.hash.removeprefix('sha256:')[:12]}"
