"""The engine process over a real Valkey, with a tiny random model: streams, aborts, drains, restarts of either side."""

import asyncio
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from llm.engine import Engine
from llm.errors import UnsupportedModel
from llm.grammar import GrammarCompiler
from llm.model_runner import ModelRunner
from llm.request import Grammar as EngineGrammar
from llm.request import Request, SamplingParams
from llm.sampling import Draw, Drawn, sample
from media_server.settings import CONFIG_VERSION, Settings
from media_server.text.engine import GRAMMAR_TOO_COMPLEX, AsyncEngineClient, EngineClient, EngineUnavailable, Prompt
from media_server.text.messages import (
    ENGINES_KEY,
    Announcement,
    Generate,
    Grammar,
    RequestMeta,
    Sampling,
    TextEvent,
    engine_key,
    inbox_key,
    meta_key,
    outbox_key,
)
from media_server.text.reading import Reading
from media_server.text.requests import MAX_GRAMMAR_CHARS
from tests.llm.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer
from tests.llm.conftest import tiny_model
from workers import engine_announcer, engine_border, engine_grammars, engine_inbox, engine_outbox, engine_process
from workers.engine_outbox import Outbox
from workers.engine_process import EngineProcess
from workers.leases import withdraw_engine
from workers.valkey import valkey_command, wait_until_answering

MODEL = "tiny"
# what a busy machine may take
LIMIT_S = 120.0


def tiny_engine() -> Engine:
    """A random Llama whose tokens are bytes; the same each time."""
    runner = ModelRunner(tiny_model(max_position_embeddings=4096), 16384)
    tokenizer = LLTokenizer(byte_tokenizer().to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS])
    return Engine(runner, tokenizer, (EOS,))


class Valkey:
    """A real server that can be killed and started again, empty."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.settings.valkey_socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(valkey_command(self.settings), stdout=subprocess.DEVNULL)
        assert wait_until_answering(self.settings.redis_url, LIMIT_S)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", gpus=())


@pytest.fixture
def valkey(settings: Settings) -> Iterator[Valkey]:
    server = Valkey(settings)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def client(settings: Settings, valkey: Valkey) -> EngineClient:
    return EngineClient(redis.Redis.from_url(settings.redis_url, socket_timeout=10))


@pytest.fixture
def start(settings: Settings, valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], EngineProcess]]:
    monkeypatch.setattr(engine_inbox, "READ_BLOCK_MS", 50)
    running: list[tuple[EngineProcess, threading.Thread]] = []

    def run() -> EngineProcess:
        process = EngineProcess(tiny_engine(), settings, "engine-0", MODEL)
        thread = threading.Thread(target=process.run)
        thread.start()
        running.append((process, thread))
        server = redis.Redis.from_url(settings.redis_url)
        wait_for(lambda: process.instance.encode() in (server.get(engine_key("engine-0")) or b""))
        return process

    yield run
    for process, thread in running:
        process.stopping.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def wait_for(find: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not find():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def prompt(
    id: str, *, seed: int = 0, max_tokens: int = 40, resume_s: float | None = None, **sampling: object
) -> Prompt:
    rng = random.Random(id)
    params = Sampling(seed=seed, max_tokens=max_tokens, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return Prompt(id, MODEL, [rng.randrange(200) for _ in range(20)], params, resume_s=resume_s)


def read(client: EngineClient, reading: Reading) -> list[TextEvent]:
    return [entry.event for entry in client.events(reading) if entry is not None]


def text_of(events: list[TextEvent]) -> str:
    return "".join(event.text for event in events)


def message(item: Prompt, meta: RequestMeta) -> Generate:
    return Generate(
        id=item.id,
        deadline=time.time() + 60,
        model=MODEL,
        prompt_token_ids=list(item.token_ids),
        sampling=item.sampling,
        meta=meta,
    )


def expected(item: Prompt) -> str:
    """What the engine writes without any process around it."""
    engine = tiny_engine()
    sampling = item.sampling
    params = SamplingParams(seed=sampling.seed, max_tokens=sampling.max_tokens, ignore_eos=True)
    engine.add_request(Request(item.id, tuple(item.token_ids), params))
    text = ""
    while engine.has_work:
        engine.launch()
        text += "".join(output.text for output in engine.collect())
    return text


def test_requests_of_many_clients_are_answered_as_alone(
    client: EngineClient, start: Callable[[], EngineProcess]
) -> None:
    start()
    prompts = [prompt(f"req_{number}", seed=number) for number in range(5)]
    readings = [client.submit(item) for item in prompts]
    for item, reading in zip(prompts, readings, strict=True):
        events = read(client, reading)
        assert events[0].is_accepted
        assert text_of(events) == expected(item)
        assert events[-1].finish_reason == "length"
        usage = events[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (20, 40)


def test_several_answers_share_a_stream_and_its_usage(client: EngineClient, start: Callable[[], EngineProcess]) -> None:
    start()
    events = read(client, client.submit(prompt("req_n", max_tokens=10, n=3, logprobs=2)))
    assert {event.index for event in events} == {0, 1, 2}
    assert sum(event.finish_reason is not None for event in events) == 3
    assert [event.is_last for event in events].count(True) == 1
    usage = events[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (20, 30)
    drawn = [token for event in events for token in event.logprobs or ()]
    assert len(drawn) == 30
    assert all(len(token.top_logprobs) == 2 for token in drawn)
    assert bytes(drawn[0].bytes).decode("utf-8", "replace") == drawn[0].token


def test_a_beginning_is_read_once_for_the_owner_of_a_key_and_for_no_other(
    client: EngineClient, start: Callable[[], EngineProcess]
) -> None:
    start()
    asked = prompt("req_cached", max_tokens=4)

    def cached_tokens(number: int, **changes: object) -> int:
        again = replace(asked, id=f"req_cached_{number}", **changes)  # type: ignore[arg-type]
        usage = read(client, client.submit(again))[-1].usage
        assert usage is not None
        return usage.cached_tokens

    # of 20 tokens one block of 16
    assert cached_tokens(0, owner_key_id="key_a") == 0
    assert cached_tokens(1, owner_key_id="key_a") == 16
    assert cached_tokens(2, owner_key_id="key_b") == 0
    # what is to be forgotten is not kept for the next
    assert cached_tokens(3, owner_key_id="key_c", is_forgotten=True) == 0
    assert cached_tokens(4, owner_key_id="key_c") == 0


def test_answers_that_fail_in_one_step_end_their_request_and_no_other(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, start: Callable[[], EngineProcess]
) -> None:
    bad_seed = 666

    def sample_or_fail(logits: Tensor, draws: Sequence[Draw], **options: Any) -> Drawn:
        failing = [row for row, draw in enumerate(draws) if draw.params.seed == bad_seed and draw.position >= 2]
        broken = logits.clone()
        broken[failing] = float("nan")
        return sample(broken, draws, **options)

    monkeypatch.setattr("llm.engine.sample", sample_or_fail)
    process = start()
    good = prompt("req_good", max_tokens=120)
    reading = client.submit(good)
    events = read(client, client.submit(prompt("req_bad", seed=bad_seed, n=3)))
    assert [event.is_last for event in events].count(True) == 1
    assert events[-1].error is not None
    assert events[-1].error.code == "model_error"
    assert text_of(read(client, reading)) == expected(good)
    assert not process.has_ended.is_set()


def test_a_request_that_cannot_be_begun_ends_alone(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, start: Callable[[], EngineProcess]
) -> None:
    def to_request(message: Generate) -> Request:
        if message.id == "req_odd":
            raise ValueError("not foreseen")
        return engine_border.to_request(message)

    monkeypatch.setattr(engine_process, "to_request", to_request)
    start()
    good = prompt("req_good", max_tokens=60)
    reading = client.submit(good)
    (event,) = read(client, client.submit(prompt("req_odd")))
    assert event.error is not None
    assert (event.error.code, event.is_last) == ("model_error", True)
    assert text_of(read(client, reading)) == expected(good)


def test_refusals_come_back_by_field(client: EngineClient, start: Callable[[], EngineProcess]) -> None:
    start()
    (event,) = read(client, client.submit(prompt("req_long", max_tokens=5000)))
    assert event.error is not None
    assert (event.error.code, event.error.param) == ("context_length_exceeded", "max_tokens")
    assert "4096" in event.error.message
    bad = Prompt("req_bad", MODEL, [1], Sampling(max_tokens=4), Grammar(type="regex", value="("))
    (event,) = read(client, client.submit(bad))
    assert event.error is not None
    assert event.error.param == "grammar"
    huge = Prompt("req_huge", MODEL, [1], Sampling(max_tokens=4), Grammar(type="regex", value="a{1000000}"))
    (event,) = read(client, client.submit(huge))
    assert event.error is not None
    assert (event.error.code, event.error.param) == (GRAMMAR_TOO_COMPLEX, "grammar")


def test_a_grammar_that_grows_past_the_limits_is_named(
    client: EngineClient, start: Callable[[], EngineProcess]
) -> None:
    start()
    many = {f"p{number}": {"type": "string"} for number in range(3000)}
    members = {"kind": {"enum": ["ab", "cd"]}, "rest": {"type": "object", "properties": many}}
    schema = {"type": "object", "properties": members, "required": ["kind", "rest"], "additionalProperties": False}
    grammar = Grammar(type="json_schema", value=json.dumps(schema))
    events = read(client, client.submit(Prompt("req_grows", MODEL, [1], Sampling(max_tokens=100), grammar)))
    assert events[0].is_accepted
    assert events[-1].error is not None
    assert (events[-1].error.code, events[-1].error.param) == (GRAMMAR_TOO_COMPLEX, "response_format")
    assert "state" not in events[-1].error.message


class SlowCompiler(GrammarCompiler):
    """Holds the grammar `slow` up until it is let go."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        super().__init__(tokenizer)
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def compile(self, grammar: EngineGrammar) -> LLMatcher:
        if grammar.value == "slow":
            self.has_begun.set()
            assert self.may_end.wait(LIMIT_S)
        return super().compile(grammar)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> SlowCompiler:
    compiler = SlowCompiler(tiny_engine().tokenizer)
    monkeypatch.setattr("llm.engine.GrammarCompiler", lambda _: compiler)
    return compiler


SLOW = Grammar(type="regex", value="slow")


def slow_prompt(id: str) -> Prompt:
    return Prompt(id, MODEL, [1, 2, 3], Sampling(max_tokens=10), SLOW)


def test_texts_go_on_while_a_grammar_is_compiled(
    client: EngineClient, compiler: SlowCompiler, start: Callable[[], EngineProcess]
) -> None:
    start()
    waiting = client.submit(slow_prompt("req_slow"))
    assert compiler.has_begun.wait(LIMIT_S)
    other = prompt("req_other", max_tokens=60)
    assert text_of(read(client, client.submit(other))) == expected(other)
    # and other grammars are compiled beside it
    quick = Prompt("req_quick", MODEL, [1], Sampling(max_tokens=10), Grammar(type="regex", value="quick"))
    assert text_of(read(client, client.submit(quick))) == "quick"
    compiler.may_end.set()
    assert text_of(read(client, waiting)) == "slow"


def test_a_request_whose_grammar_is_compiled_can_be_ended(
    client: EngineClient, compiler: SlowCompiler, start: Callable[[], EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start()
    aborted = client.submit(slow_prompt("req_aborted"))
    assert compiler.has_begun.wait(LIMIT_S)
    client.abort(aborted)
    (event,) = read(client, aborted)
    assert event.error is not None and event.error.code == "aborted"
    late = client.submit(replace(slow_prompt("req_late"), deadline_s=0.2))
    (event,) = read(client, late)
    assert event.error is not None and event.error.code == "deadline_exceeded"
    monkeypatch.setattr(engine_grammars, "COMPILE_S", 0.1)
    (event,) = read(client, client.submit(slow_prompt("req_large")))
    assert event.error is not None and event.error.code == GRAMMAR_TOO_COMPLEX
    # what is ready now is nobody's
    compiler.may_end.set()
    other = prompt("req_other")
    assert text_of(read(client, client.submit(other))) == expected(other)
    assert len(process.grammars) == 0 and not process.engine.has_work


def test_an_answer_that_repeats_itself_for_ever_is_cut_and_counted(
    client: EngineClient, settings: Settings, start: Callable[[], EngineProcess]
) -> None:
    """The model is well, and told to say one token alone: the second try says the same."""
    start()
    # the byte-level alphabet begins with "!"
    stuck: dict[str, Any] = {"logit_bias": {ord("Z") - 33: 100.0}, "temperature": 0.0}
    events = read(client, client.submit(prompt("req_stuck", max_tokens=200, collapse_guard=True, **stuck)))
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("length", "collapse")
    assert text_of(events) in ("Z", "")
    free = read(client, client.submit(prompt("req_free", max_tokens=200, collapse_guard=False, **stuck)))
    assert (free[-1].finish_reason, free[-1].stop_reason) == ("length", None)
    assert text_of(free) == "Z" * 200
    server = redis.Redis.from_url(settings.redis_url)

    def counted() -> bool:
        said = Announcement.model_validate_json(server.get(engine_key("engine-0")) or "")
        return (said.second_tries, said.collapses) == (1, 1) and said.greedy_choices > 200

    wait_for(counted)


def test_a_long_chain_of_rules_does_not_end_the_engine(
    client: EngineClient, start: Callable[[], EngineProcess]
) -> None:
    """As long as the API lets through; the parser goes down it by recursion."""
    start()
    rules = [f"{number:x}" for number in range(11_000)]
    chain = "start: x0\n" + "\n".join(f"x{one}:x{other}" for one, other in itertools.pairwise(rules))
    assert 90_000 < len(chain) < MAX_GRAMMAR_CHARS + 50_000
    grammar = Grammar(type="lark", value=f'{chain}\nx{rules[-1]}: "a"')
    events = read(client, client.submit(Prompt("req_chain", MODEL, [1], Sampling(max_tokens=4), grammar)))
    assert text_of(events) == "a" or events[-1].error is not None
    good = prompt("req_good")
    assert text_of(read(client, client.submit(good))) == expected(good)


def test_a_drain_waits_for_grammars(
    client: EngineClient, compiler: SlowCompiler, start: Callable[[], EngineProcess]
) -> None:
    process = start()
    waiting = client.submit(slow_prompt("req_slow"))
    assert compiler.has_begun.wait(LIMIT_S)
    process.stopping.set()
    threading.Timer(0.3, compiler.may_end.set).start()
    assert text_of(read(client, waiting)) == "slow"


def test_a_message_of_another_version_is_answered(
    client: EngineClient, settings: Settings, start: Callable[[], EngineProcess]
) -> None:
    process = start()
    meta = RequestMeta(engine="engine-0", instance=process.instance, model=MODEL, created=0)
    later = message(prompt("req_later"), meta)
    server = redis.Redis.from_url(settings.redis_url)
    server.xadd(inbox_key("engine-0"), {"m": json.dumps({**later.model_dump(), "v": 2})})
    server.xadd(inbox_key("engine-0"), {"m": b"[]"})
    (event,) = read(client, Reading("req_later", meta, message=later))
    assert event.error is not None
    assert (event.error.code, event.is_last) == ("engine_unavailable", True)
    good = prompt("req_good")
    assert text_of(read(client, client.submit(good))) == expected(good)


def test_a_loop_that_hangs_ends_its_process(settings: Settings, valkey: Valkey) -> None:
    """Also where the loop is in a call that never returns and Python can do nothing about it."""
    code = (
        "import sys, time\n"
        "from media_server.settings import Settings\n"
        "from workers import engine_announcer\n"
        "from tests.workers.test_engine_process import MODEL, EngineProcess, tiny_engine\n"
        "engine_announcer.ABANDONED_S = engine_announcer.ANNOUNCE_S = 0.5\n"
        "process = EngineProcess(tiny_engine(), Settings(data_dir=sys.argv[1], gpus=()), 'engine-0', MODEL)\n"
        "process._end_late = lambda: time.sleep(600)\n"
        "process.run()\n"
    )
    arguments = [sys.executable, "-c", code, str(settings.data_dir)]
    hung = subprocess.run(arguments, env={**os.environ, "PYTHONPATH": os.getcwd()}, timeout=LIMIT_S, check=False)
    assert hung.returncode == engine_announcer.EXIT_HUNG


def test_an_abort_frees_the_places_at_once(client: EngineClient, start: Callable[[], EngineProcess]) -> None:
    process = start()
    reading = client.submit(prompt("req_gone", max_tokens=4000))
    entries = client.events(reading)
    for _ in range(3):
        next(entries)
    client.abort(reading)
    last = [entry for entry in entries if entry is not None][-1].event
    assert last.error is not None
    assert last.error.code == "aborted"
    wait_for(lambda: not process.engine.has_work)
    process.engine.check_idle()


def test_a_deadline_ends_a_request(client: EngineClient, start: Callable[[], EngineProcess]) -> None:
    start()
    item = prompt("req_late", max_tokens=4000)
    events = read(client, client.submit(Prompt(item.id, MODEL, item.token_ids, item.sampling, deadline_s=0.3)))
    assert events[-1].error is not None
    assert events[-1].error.code == "deadline_exceeded"


def test_a_stream_is_taken_up_again_from_any_event(client: EngineClient, start: Callable[[], EngineProcess]) -> None:
    start()
    whole = read(client, client.submit(prompt("req_again", resume_s=50)))
    meta = Reading("req_again", client.submit(prompt("req_other")).meta).meta
    for after in (0, 1, 7, len(whole) - 1):
        assert read(client, Reading("req_again", meta, after)) == whole[after:]


def test_streams_expire(client: EngineClient, settings: Settings, start: Callable[[], EngineProcess]) -> None:
    start()
    read(client, client.submit(prompt("req_short")))
    read(client, client.submit(prompt("req_kept", resume_s=200)))
    server = redis.Redis.from_url(settings.redis_url)
    assert 0 < server.ttl(outbox_key("req_short")) <= 60
    assert 190 < server.ttl(outbox_key("req_kept")) <= 200
    assert 190 < server.ttl(meta_key("req_kept")) <= 200


def test_the_stream_of_a_request_that_waits_is_renewed(
    client: EngineClient, settings: Settings, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_outbox, "RENEW_S", 0.0)
    monkeypatch.setattr(engine_outbox, "CHECK_S", 0.0)
    server = redis.Redis.from_url(settings.redis_url)
    outbox = Outbox(server, "test")
    meta = RequestMeta(engine="engine-0", instance="x", model=MODEL, created=0)
    outbox.open("req_waits", meta)
    outbox.add("req_waits", TextEvent(is_accepted=True))
    assert outbox.flush()
    keys = (outbox_key("req_waits"), meta_key("req_waits"))
    for key in keys:
        server.expire(key, 1)
    # it waits for its turn, without news
    assert outbox.flush()
    assert all(server.ttl(key) > 50 for key in keys)
    # one whose time was up all the same is written again
    server.delete(*keys)
    assert outbox.flush()
    assert all(server.ttl(key) > 50 for key in keys)
    assert server.xlen(keys[0]) == 1
    # after its end it lasts as long as was asked for, and no longer
    outbox.add("req_waits", TextEvent(is_last=True))
    assert outbox.flush()
    for key in keys:
        server.expire(key, 10)
    assert outbox.flush()
    assert all(server.ttl(key) <= 10 for key in keys)


def test_a_valkey_that_restarts_empty_costs_no_token(
    client: EngineClient, valkey: Valkey, monkeypatch: pytest.MonkeyPatch, start: Callable[[], EngineProcess]
) -> None:
    # how long a restart takes is the machine's affair
    monkeypatch.setattr("media_server.text.reading.GONE_S", LIMIT_S)
    monkeypatch.setattr("media_server.text.reading.OUTAGE_S", LIMIT_S)
    start()
    item = prompt("req_through", max_tokens=300)
    reading = client.submit(item)
    entries = client.events(reading)
    events: list[TextEvent] = []
    for entry in entries:
        if entry is not None:
            events.append(entry.event)
        if len(events) in (40, 160) and entry is not None:
            valkey.kill()
            valkey.start()
    assert text_of(events) == expected(item)
    assert sum(len(event.token_ids) for event in events) == 300


def test_a_message_that_valkey_lost_is_sent_again(
    client: EngineClient, settings: Settings, valkey: Valkey, monkeypatch: pytest.MonkeyPatch,
    start: Callable[[], EngineProcess],
) -> None:  # fmt: skip
    monkeypatch.setattr("media_server.text.reading.RESEND_S", 0.5)
    start()
    item = prompt("req_lost")
    reading = client.submit(item)
    assert text_of(read(client, reading)) == expected(item)
    # as if the first message had never arrived: under another id, never sent
    again = prompt("req_lost_2")
    lost = Reading(again.id, reading.meta, message=message(again, reading.meta))
    assert text_of(read(client, lost)) == expected(again)


def test_the_same_message_twice_is_one_request(client: EngineClient, start: Callable[[], EngineProcess]) -> None:
    process = start()
    item = prompt("req_twice", max_tokens=150)
    reading = client.submit(item)
    client._send(message(item, reading.meta))
    assert text_of(read(client, reading)) == expected(item)
    assert process.inbox.empty()


def test_an_engine_that_restarts_is_noticed(
    client: EngineClient, settings: Settings, start: Callable[[], EngineProcess]
) -> None:
    start()
    reading = client.submit(prompt("req_x", max_tokens=4))
    read(client, reading)
    gone = reading.meta.model_copy(update={"instance": "the one before"})
    with pytest.raises(EngineUnavailable, match="restarted"):
        read(client, Reading("req_nobody", gone))


def test_draining_finishes_what_runs_and_takes_nothing_new(
    client: EngineClient, settings: Settings, start: Callable[[], EngineProcess]
) -> None:
    process = start()
    item = prompt("req_last", max_tokens=120)
    reading = client.submit(item)
    entries = client.events(reading)
    assert next(entries) is not None
    process.stopping.set()
    assert text_of([entry.event for entry in entries if entry is not None]) == expected(item)
    assert process.has_ended.wait(LIMIT_S)

    def is_refused() -> bool:
        try:
            client.submit(prompt("req_after"))
        except EngineUnavailable:
            return True
        return False

    wait_for(is_refused)


def test_what_does_not_finish_in_the_drain_is_told(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, start: Callable[[], EngineProcess]
) -> None:
    monkeypatch.setattr(engine_process, "DRAIN_S", 0.2)
    process = start()
    reading = client.submit(prompt("req_long", max_tokens=4000))
    entries = client.events(reading)
    next(entries)
    process.stopping.set()
    last = [entry for entry in entries if entry is not None][-1].event
    assert last.error is not None
    assert last.error.code == "engine_unavailable"


def test_what_can_be_asked_for_is_what_the_broker_knows(
    settings: Settings, valkey: Valkey, start: Callable[[], EngineProcess]
) -> None:
    """/health/ready asks this: an empty broker, a draining engine and one that was seen to die serve nothing."""

    async def served() -> set[str]:
        async with redis.asyncio.from_url(settings.redis_url) as server:
            return await AsyncEngineClient(server).served_models()

    assert asyncio.run(served()) == set()
    process = start()
    assert asyncio.run(served()) == {MODEL}
    # a restarted broker is empty until the engine's next sign of life
    valkey.kill()
    valkey.start()
    wait_for(lambda: asyncio.run(served()) == {MODEL})
    process.stopping.set()
    wait_for(lambda: asyncio.run(served()) == set())
    full_name = f"engine-1@{socket.gethostname()}"
    killed = Announcement(name=full_name, instance="i", model=MODEL).model_dump_json()
    with redis.Redis.from_url(settings.redis_url) as server:
        server.sadd(ENGINES_KEY, full_name)
        server.set(engine_key(full_name), killed)
    assert asyncio.run(served()) == {MODEL}
    withdraw_engine(settings.redis_url, "engine-1")
    assert asyncio.run(served()) == set()
    valkey.kill()
    with pytest.raises(EngineUnavailable):
        asyncio.run(served())
    withdraw_engine(settings.redis_url, "engine-1")


@pytest.mark.parametrize(("text", "flags", "asked"), [
    ("", (), (False, True)),
    ("", ("--invariant",), (True, True)),
    ("invariant = true\ncollapse_guard = false\n", (), (True, False)),
])  # fmt: skip
def test_settings_and_the_flag_reach_the_engine(
    text: str, flags: tuple[str, ...], asked: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[tuple[bool, bool]] = []

    def load(folder: Path, device: str, *, is_invariant: bool, has_guard: bool) -> Engine:
        got.append((is_invariant, has_guard))
        raise UnsupportedModel("far enough")

    monkeypatch.setattr(engine_process, "load_engine", load)
    monkeypatch.setattr(engine_process, "setup_logging", lambda *_: None)
    config = tmp_path / "config.toml"
    model = '[[models]]\nname = "m"\nkind = "text"\npath = "nowhere"\n'
    config.write_text(f'version = {CONFIG_VERSION}\ndata_dir = "data"\n{text}{model}')
    assert engine_process.main(["--config", str(config), *flags]) == 1
    assert got == [asked]
