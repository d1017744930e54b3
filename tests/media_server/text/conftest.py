"""The API on a real socket and a real Valkey; a scripted engine speaks the protocol in the place of a model."""

import json
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
import redis
import uvicorn
from llguidance import LLMatcher, LLTokenizer

from media_server.app import create_app
from media_server.artifacts.store import open_artifacts
from media_server.jobs.database import Database
from media_server.models.card import TextCard
from media_server.models.registry import publish
from media_server.settings import Settings
from media_server.text.engine import GRAMMAR_TOO_COMPLEX
from media_server.text.messages import (
    ENGINES_KEY,
    Announcement,
    Failure,
    Generate,
    Grammar,
    TextEvent,
    TokenChoice,
    TokenLogprob,
    Usage,
    engine_key,
    inbox_key,
    meta_key,
    outbox_key,
)
from media_server.text.storyboard import Ask
from tests.cards import CAPTIONED_CARD
from tests.fresh_database import open_migrated
from tests.llm.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer
from workers.valkey import valkey_command, wait_until_answering

MODEL = "scripted"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class RandomWriter:
    """Writes whatever a grammar allows, at random: what holds for it holds for every model."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tokenizer = LLTokenizer(byte_tokenizer().to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS])
        self.asks: list[Ask] = []

    def __call__(self, ask: Ask) -> Iterator[str]:
        self.asks.append(ask)
        return self.write(ask.grammar)

    def write(self, grammar: Grammar) -> Iterator[str]:
        if grammar.type == "choice":
            yield self.rng.choice(json.loads(grammar.value))
            return
        # the layout of llm.grammar
        source = LLMatcher.grammar_from_json_schema(
            grammar.value, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        )
        matcher = LLMatcher(self.tokenizer, source)
        assert not matcher.is_error(), matcher.get_error()
        written: list[int] = []
        while not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            token = self.rng.choice([token for token in range(256) if mask[token // 8] >> (token % 8) & 1])
            assert matcher.consume_token(token)
            written.append(token)
        text = self.tokenizer.decode_bytes(written).decode()
        jsonschema.validate(json.loads(text), json.loads(grammar.value))
        for start in range(0, len(text), 40):
            yield text[start : start + 40]


@dataclass
class ScriptedEngine:
    """Answers with what the last line of the prompt says after `say `, cut at random; other words make it misbehave.

    "endlessly" has it stop after the first part until it is told to abort.
    """

    settings: Settings
    seed: int = 0
    requests: list[Generate] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.redis = redis.Redis.from_url(self.settings.redis_url)
        self.announce()

    def announce(self, instance: str = "1") -> None:
        announcement = Announcement(name="engine-0", instance=instance, model=MODEL)
        self.redis.sadd(ENGINES_KEY, "engine-0")
        self.redis.set(engine_key("engine-0"), announcement.model_dump_json())

    def run(self) -> None:
        last: Any = "0-0"
        while not self.stopping.is_set():
            reply: Any = self.redis.xread({inbox_key("engine-0"): last}, block=50)
            for _, entries in reply or ():
                for entry_id, fields in entries:
                    last = entry_id
                    message = json.loads(fields[b"m"])
                    if message["type"] == "abort":
                        self.aborted.append(message["id"])
                    else:
                        threading.Thread(target=self.answer, args=(Generate.model_validate(message),)).start()

    def answer(self, request: Generate) -> None:
        self.requests.append(request)
        prompt = byte_tokenizer().decode(request.prompt_token_ids)
        _, _, text = prompt.rpartition("say ")
        text = text.removesuffix("\n<assistant>")
        self.redis.set(meta_key(request.id), request.meta.model_dump_json(), ex=60)
        if request.grammar is not None and "say" not in prompt:
            try:
                text = "".join(RandomWriter(self.seed).write(request.grammar))
            except (ValueError, AssertionError) as error:
                failure = Failure(code="invalid_request", message=f"grammar: {error}", param="grammar")
                self.write(request.id, 1, TextEvent(error=failure, is_last=True))
                return
        if "refuse" in prompt:
            failure = Failure(
                code="context_length_exceeded", message="The model's context is 9 tokens.", param="prompt"
            )
            self.write(request.id, 1, TextEvent(error=failure, is_last=True))
            return
        self.write(request.id, 1, TextEvent(is_accepted=True))
        rng = random.Random(self.seed)
        number, count = 1, request.sampling.n
        for index in range(count):
            rest = text
            while rest:
                size = rng.choice((1, 1, 2, 5, 50))
                part, rest = rest[:size], rest[size:]
                number += 1
                self.write(request.id, number, TextEvent(index=index, text=part, logprobs=self.logprobs(request, part)))
                if "slowly" in prompt:
                    time.sleep(0.05)
                while "endlessly" in prompt and request.id not in self.aborted and not self.stopping.is_set():
                    time.sleep(0.01)
                if request.id in self.aborted:
                    return
            if "entangle" in prompt:
                failure = Failure(
                    code=GRAMMAR_TOO_COMPLEX, message="grammar: the regex is too complex.", param="grammar"
                )
                self.write(request.id, number + 1, TextEvent(error=failure, is_last=True))
                return
            if "break" in prompt:
                failure = Failure(code="model_error", message="The model failed.")
                self.write(request.id, number + 1, TextEvent(error=failure, is_last=True))
                return
            number += 1
            is_last = index == count - 1
            usage = Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=count * len(text))
            end = TextEvent(index=index, finish_reason="stop", usage=usage if is_last else None, is_last=is_last)
            if "collapse" in prompt and request.sampling.collapse_guard:
                end = end.model_copy(update={"finish_reason": "length", "stop_reason": "collapse"})
            self.write(request.id, number, end)

    @staticmethod
    def logprobs(request: Generate, part: str) -> list[TokenLogprob] | None:
        if request.sampling.logprobs is None:
            return None
        top = [TokenChoice(token="x", logprob=-2.5, bytes=[120])] * request.sampling.logprobs
        return [TokenLogprob(token=c, logprob=-0.5, bytes=list(c.encode()), top_logprobs=top) for c in part]

    def write(self, request_id: str, number: int, event: TextEvent) -> None:
        self.redis.xadd(outbox_key(request_id), {"d": event.model_dump_json(exclude_defaults=True)}, id=f"{number}-0")
        self.redis.expire(outbox_key(request_id), 60)


@dataclass
class TextService:
    """The API with what stands behind it."""

    settings: Settings
    url: str
    db: Database
    engine: ScriptedEngine

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextService]:
    root: Path = tmp_path_factory.mktemp("text")
    settings = Settings(data_dir=root / "data", gpus=(), resume_s=120.0)
    settings.data_dir.mkdir()
    db = open_migrated(settings.database)
    artifacts = open_artifacts(settings)
    artifacts.put_bytes("models/scripted/1/tokenizer.json", byte_tokenizer().to_str().encode(), "application/json")
    artifacts.put_bytes("models/scripted/1/chat_template.jinja", TEMPLATE.encode(), "text/plain")
    card = TextCard(
        name=MODEL, pool="text", revision="1", hash="sha256:0123456789abcdef", license="none", origin="test",
        context_length=4000, tokenizer="models/scripted/1/tokenizer.json",
        chat_template="models/scripted/1/chat_template.jinja", eos_token_ids=[EOS],
    )  # fmt: skip
    publish(db, card, "engine-0")
    publish(db, CAPTIONED_CARD, "video-0")
    valkey = subprocess.Popen(valkey_command(settings), stdout=subprocess.DEVNULL)
    assert wait_until_answering(settings.redis_url, 120)
    engine = ScriptedEngine(settings)
    server = uvicorn.Server(
        uvicorn.Config(create_app(settings), port=0, log_level="warning", timeout_graceful_shutdown=1)
    )
    threads = [threading.Thread(target=server.run), threading.Thread(target=engine.run)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 120
    while not server.started:
        assert threads[0].is_alive() and time.monotonic() < deadline, "the API did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield TextService(settings, f"http://127.0.0.1:{port}", db, engine)
    server.should_exit = True
    engine.stopping.set()
    for thread in threads:
        thread.join(20)
    db.close()
    valkey.kill()
    valkey.wait()
