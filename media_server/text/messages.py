"""What the front and an engine say to each other through Valkey, version 1.

    ms:engines            set of the names of engine replicas
    ms:engine:<name>      who it is and how busy: an Announcement, gone 10 s after its last sign of life
    ms:engine:<name>:in   stream of messages to it: field `m`, a Generate or an Abort
    ms:req:<id>           what a request was, for whoever takes its stream up again: a RequestMeta
    ms:req:<id>:out       stream of what it wrote: field `d`, a TextEvent; ids are 1-0, 2-0, ...

Entry ids count events, so an engine that finds Valkey emptied writes the same events under the same ids again, and a
reader goes on from the last id that it has seen without a gap or a repetition.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ENGINES_KEY = "ms:engines"
ANNOUNCE_TTL_S = 10
# how long a stream is kept after its end if nobody asked to take it up again: a reader may lag
LINGER_S = 60.0
# how long one that is to be forgotten outlives its end at most, if its reader has gone
FORGET_S = 5.0
# how long a message waits for an engine that does not read: its sender has sent it again long before
INBOX_S = 60


def engine_key(name: str) -> str:
    """Key of a replica's announcement."""
    return f"ms:engine:{name}"


def inbox_key(name: str) -> str:
    """Key of the stream that a replica reads."""
    return f"ms:engine:{name}:in"


def meta_key(request_id: str) -> str:
    """Key of what a request was."""
    return f"ms:req:{request_id}"


def outbox_key(request_id: str) -> str:
    """Key of the stream that a request's events are written to."""
    return f"ms:req:{request_id}:out"


class _Message(BaseModel):
    # fields that a newer release adds are ignored, so that replicas can be renewed one by one
    model_config = ConfigDict(frozen=True, extra="ignore")


class Announcement(_Message):
    """A replica's sign of life; `instance` changes when it restarts and has forgotten its requests."""

    v: Literal[1] = 1
    name: str
    instance: str
    model: str
    running: int = 0
    waiting: int = 0
    is_draining: bool = False
    # token places of its K/V cache, and those in use; None from a release that does not say
    kv_tokens: int | None = None
    kv_used_tokens: int | None = None
    # since it started: choices at temperature 0, those that another batch might make otherwise, answers that collapsed
    # and were tried again, and those that then ended so
    greedy_choices: int = 0
    near_ties: int = 0
    second_tries: int = 0
    collapses: int = 0

    @property
    def load(self) -> int:
        """Answers in the making and waiting."""
        return self.running + self.waiting


class Sampling(_Message):
    """How tokens are drawn; llm.request.SamplingParams has the meaning of each."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    n: int = 1
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    collapse_guard: bool = False


class Grammar(_Message):
    """What the text must obey: a schema as JSON text, a regex, a Lark grammar, or a JSON list of choices."""

    type: Literal["json_schema", "json_object", "regex", "lark", "choice"]
    value: str = ""


class RequestMeta(_Message):
    """What must be known to go on with a stream: whose it is, and how it is answered."""

    engine: str
    instance: str
    model: str
    created: int
    owner_key_id: str | None = None
    # its stream is removed when its reader has it all
    is_forgotten: bool = False
    # the route's own: kind of answer, whether usage was asked for, and so on
    answer: dict[str, Any] = {}


class Generate(_Message):
    """A prompt to go on from. `deadline` is unix seconds; `resume_s` keeps the stream for so long after its end."""

    v: Literal[1] = 1
    type: Literal["generate"] = "generate"
    id: str
    trace: str | None = None
    deadline: float
    model: str
    prompt_token_ids: list[int]
    sampling: Sampling = Sampling()
    grammar: Grammar | None = None
    resume_s: float | None = None
    priority: int = 0
    # requests of another salt share no cached beginning; None: the owner of the API key is the salt
    cache_salt: str | None = None
    meta: RequestMeta


class Abort(_Message):
    """End a request whose reader has gone."""

    v: Literal[1] = 1
    type: Literal["abort"] = "abort"
    id: str


Message = Annotated[Generate | Abort, Field(discriminator="type")]


class TokenChoice(_Message):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TokenChoice):
    """A token that was drawn, beside the likeliest others."""

    top_logprobs: list[TokenChoice] = []


class Usage(_Message):
    """Tokens of a whole request; `cached_tokens` of the prompt came from the engine's prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


class Failure(_Message):
    """Why a request ended without an answer."""

    code: str
    message: str
    param: str | None = None


class TextEvent(_Message):
    """One step of one answer. The first event of a request has `is_accepted` alone; the last one has `is_last`."""

    index: int = 0
    is_accepted: bool = False
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    # beside finish_reason, where it says too little: the answer was cut since it repeated itself without end
    stop_reason: Literal["collapse"] | None = None
    # of the whole request, with its last event
    usage: Usage | None = None
    error: Failure | None = None
    is_last: bool = False
