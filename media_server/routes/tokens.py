"""/tokenize and /detokenize: what a language model reads and writes, as it counts it."""

from typing import Annotated, Self

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from media_server.errors import InvalidRequest
from media_server.http_body import read_json
from media_server.http_openapi import errors
from media_server.http_requests import parse_body
from media_server.http_text import load_text_model
from media_server.text.openapi import json_body
from media_server.text.requests import MAX_MESSAGES, ChatMessage
from media_server.validation import RequestModel

router = APIRouter(tags=["chat"])


class TokenizeRequest(RequestModel):
    """A text, or a conversation as its chat template writes it."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"prompt": "a red ball"}, {"messages": [{"role": "user", "content": "Name three colours."}]}]
        },
    )

    model: str | None = Field(None, max_length=200, description="The first text model if left out.")
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = Field(
        True, description="Those that the tokenizer adds to any text; a chat's are its template's."
    )
    return_token_strs: bool = Field(False, description="Each token as the vocabulary writes it.")

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages")
        return self


class Tokens(BaseModel):
    """Token ids of a text; `max_model_len` is the model's context, prompt and answer together."""

    model: str
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Token ids to be written out."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"tokens": [1, 2, 3]}]})

    model: str | None = Field(None, max_length=200, description="The first text model if left out.")
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(max_length=1 << 20)
    skip_special_tokens: bool = False


class Text(BaseModel):
    """What token ids say; bytes that are no UTF-8 on their own become U+FFFD."""

    model: str
    prompt: str


@router.post("/tokenize", summary="Tokens of a text", responses=errors(404), openapi_extra=json_body(TokenizeRequest))
async def tokenize(request: Request) -> Tokens:
    """Give the tokens that a prompt or a conversation is for a language model."""
    _refuse_elsewhere(request)
    body = parse_body(TokenizeRequest, await read_json(request))
    model = await load_text_model(request, body.model)
    if body.messages is not None:
        token_ids = await run_in_threadpool(model.encode_chat, [message.flat() for message in body.messages])
    else:
        token_ids = await run_in_threadpool(model.encode_text, body.prompt or "", has_special=body.add_special_tokens)
    return Tokens(
        model=model.card.name,
        count=len(token_ids),
        max_model_len=model.card.context_length,
        tokens=token_ids,
        token_strs=model.token_strs(token_ids) if body.return_token_strs else None,
    )


@router.post("/detokenize", summary="Text of tokens", responses=errors(404), openapi_extra=json_body(DetokenizeRequest))
async def detokenize(request: Request) -> Text:
    """Write token ids out as text."""
    _refuse_elsewhere(request)
    body = parse_body(DetokenizeRequest, await read_json(request))
    model = await load_text_model(request, body.model)
    known = model.num_token_ids
    if unknown := [token_id for token_id in body.tokens if token_id >= known]:
        raise InvalidRequest(
            f"tokens: {model.card.name} has token ids from 0 to {known - 1}, got {unknown[0]}.",
            param="tokens",
            rule=f"0 to {known - 1}",
            value=unknown[0],
        )
    text = await run_in_threadpool(model.decode, body.tokens, skip_special=body.skip_special_tokens)
    return Text(model=model.card.name, prompt=text)


def _refuse_elsewhere(request: Request) -> None:
    if request.app.state.settings.engine_url is not None:
        raise InvalidRequest(
            "The language model is another server's, which has its tokenizer; ask it.",
            code="unsupported_parameter",
            rule="a language model of this service",
        )
