"""What a grammar promises: every answer obeys it, forced tokens cost no step, bad grammars are refused with reasons."""

import json
import re
from collections.abc import Callable

import jsonschema  # type: ignore[import-untyped]
import pytest

from llm.engine import Engine
from llm.errors import RequestRefused
from llm.request import FinishReason, Grammar, Output, Request, SamplingParams

Run = Callable[[Engine], dict[str, list[Output]]]
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 1, "maxLength": 6},
        "kind": {"enum": ["ball", "boat"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 20},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
    },
    "required": ["title", "kind", "count", "tags"],
    "additionalProperties": False,
}


def text_of(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs)


def test_every_answer_of_a_random_model_is_valid_json(make_engine: Callable[..., Engine], run_all: Run) -> None:
    engine = make_engine(kv_tokens=8192)
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    for seed in range(12):
        params = SamplingParams(seed=seed, max_tokens=200, temperature=1.5)
        engine.add_request(Request(f"r{seed}", (1, 2, 3), params, grammar))
    answers = run_all(engine)
    texts = {text_of(outputs) for outputs in answers.values()}
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(texts) > 8
    assert {outputs[-1].finish_reason for outputs in answers.values()} == {FinishReason.STOP}


def test_forced_tokens_take_no_step_of_their_own(make_engine: Callable[..., Engine]) -> None:
    steps = {}
    texts = {}
    for logprobs in (None, 0):
        engine = make_engine()
        params = SamplingParams(temperature=0, max_tokens=200, logprobs=logprobs)
        grammar = Grammar("lark", 'start: "the quick brown fox " ("jumps" | "rests") " over the lazy dog"')
        engine.add_request(Request("a", (1, 2), params, grammar))
        count, text = 0, ""
        while engine.has_work:
            engine.launch()
            text += text_of(engine.collect())
            count += 1
        steps[logprobs], texts[logprobs] = count, text
    # with logprobs each token is drawn, and the text is the same
    assert texts[None] == texts[0]
    assert re.fullmatch("the quick brown fox (jumps|rests) over the lazy dog", texts[None])
    assert steps[None] <= 3
    assert steps[0] == len(texts[0])


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[a-c]{3}-[0-9]{2}"), "[a-c]{3}-[0-9]{2}"),
        (Grammar("choice", '["left", "right \\"now\\"", "ça"]'), 'left|right "now"|ça'),
        (Grammar("lark", 'start: "a" NUMBER\nNUMBER: /[0-9]{1,4}/'), "a[0-9]{1,4}"),
    ],
)
def test_grammar_types(grammar: Grammar, pattern: str, make_engine: Callable[..., Engine], run_all: Run) -> None:
    engine = make_engine(kv_tokens=4096)
    for seed in range(6):
        engine.add_request(Request(f"r{seed}", (5,), SamplingParams(seed=seed, max_tokens=40), grammar))
    for outputs in run_all(engine).values():
        assert re.fullmatch(pattern, text_of(outputs))


def test_json_object_has_no_whitespace_to_loop_on(make_engine: Callable[..., Engine], run_all: Run) -> None:
    engine = make_engine()
    # a model that wants nothing but spaces and newlines ("Ġ" and "Ċ" of the byte alphabet)
    wants = {token: 100.0 for token in range(256) if engine.tokenizer.decode_bytes([token]) in (b" ", b"\n", b"\t")}
    closing = {token: 50.0 for token in range(256) if engine.tokenizer.decode_bytes([token]) == b"}"}
    params = SamplingParams(temperature=0, max_tokens=30, logit_bias={**wants, **closing})
    engine.add_request(Request("a", (1,), params, Grammar("json_object", "")))
    assert text_of(run_all(engine)["a"]) == "{}"


def test_stop_string_and_length_end_inside_forced_tokens(make_engine: Callable[..., Engine], run_all: Run) -> None:
    grammar = Grammar("lark", 'start: "one two three four"')
    engine = make_engine()
    engine.add_request(Request("stop", (1,), SamplingParams(stop=("thr",)), grammar))
    engine.add_request(Request("length", (1,), SamplingParams(max_tokens=6), grammar))
    answers = run_all(engine)
    assert text_of(answers["stop"]) == "one two "
    assert answers["stop"][-1].finish_reason is FinishReason.STOP
    assert text_of(answers["length"]) == "one tw"
    assert answers["length"][-1].finish_reason is FinishReason.LENGTH
    usage = answers["length"][-1].usage
    assert usage is not None
    assert usage.completion_tokens == 6


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{not json"),
        Grammar("json_schema", '{"type": "strange"}'),
        Grammar("regex", "(unclosed"),
        Grammar("lark", "start: missing_rule"),
        Grammar("choice", "[]"),
    ],
)
def test_bad_grammars_are_refused_with_the_reason(grammar: Grammar, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    with pytest.raises(RequestRefused, match=f"the {grammar.type} is (malformed|not supported): .{{5,}}"):
        engine.add_request(Request("a", (1,), SamplingParams(), grammar))
    assert not engine.has_work


MANY = {f"p{number}": {"type": "string"} for number in range(3000)}


@pytest.mark.parametrize(
    ("grammar", "param"),
    [
        (Grammar("regex", "a{1000000}"), "grammar"),
        (Grammar("lark", "start: " + " | ".join(f'"c{number}"' for number in range(20000))), "grammar"),
        (Grammar("json_schema", json.dumps({"type": "object", "properties": MANY})), "response_format"),
    ],
)
def test_grammars_past_the_parsers_limits_are_refused_by_field(
    grammar: Grammar, param: str, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    with pytest.raises(RequestRefused, match=f"{param}: the {grammar.type} is too complex: .{{5,}}") as caught:
        engine.add_request(Request("a", (1,), SamplingParams(), grammar))
    assert (caught.value.code, caught.value.param) == ("grammar_too_complex", param)
    assert "state" not in caught.value.message and len(caught.value.message) < 300
    assert not engine.has_work


def test_a_grammar_that_grows_past_the_limits_ends_its_answer_alone(
    make_engine: Callable[..., Engine], run_all: Run
) -> None:
    # the limit is met when the second member begins
    members = {"kind": {"enum": ["ab", "cd"]}, "rest": {"type": "object", "properties": MANY}}
    schema = {"type": "object", "properties": members, "required": ["kind", "rest"], "additionalProperties": False}
    engine = make_engine()
    engine.add_request(
        Request("large", (1,), SamplingParams(max_tokens=100), Grammar("json_schema", json.dumps(schema)))
    )
    engine.add_request(Request("small", (1,), SamplingParams(max_tokens=100), Grammar("choice", '["yes", "no"]')))
    answers = run_all(engine)
    last = answers["large"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert (last.error.code, last.error.param) == ("grammar_too_complex", "response_format")
    assert "state" not in last.error.message and len(last.error.message) < 300
    assert text_of(answers["small"]) in ("yes", "no")
    assert not engine.has_work
