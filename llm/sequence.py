"""One answer in the making: its tokens, its blocks of keys and values, its grammar and its text."""

from dataclasses import dataclass, field

from llguidance import LLMatcher

from llm.detokenize import Detokenizer
from llm.guard import Guard
from llm.kv_cache import SequenceBlocks
from llm.prefix_cache import BlockChain
from llm.request import FinishReason, Output, OutputError, Request, TokenLogprob, Usage


@dataclass(eq=False)
class Sequence:
    """Life: waiting (no blocks) -> running (blocks, `num_computed` rises) -> finished (`finish_reason`).

    A preempted sequence waits again: it keeps its tokens, gives its blocks back and computes them anew. One that has
    collapsed waits again too, without its suspect tokens, for its second try.
    """

    request: Request
    index: int
    # seed of this answer, another for each of n
    seed: int
    max_tokens: int
    matcher: LLMatcher | None
    detokenizer: Detokenizer
    # order of arrival
    number: int
    # names of its full blocks
    chain: BlockChain
    # watches for a collapse, where that was asked for
    guard: Guard | None = None
    token_ids: list[int] = field(default_factory=list)
    # tokens whose keys and values are in blocks, or will be after the steps that are on their way
    num_computed: int = 0
    # 1 while a drawn token is on the device and not yet known here, else 0; then its row among the drawn of its step
    num_pending: int = 0
    pending_row: int = 0
    blocks: SequenceBlocks | None = None
    # tokens of the prompt that the prefix cache had when the sequence first began; None: it has not
    num_cached: int | None = None
    # how often another that came later went first, or took its blocks
    num_overtaken: int = 0
    finish_reason: FinishReason | None = None
    error: OutputError | None = None
    # tokens at its end that the guard holds to be a collapse
    num_collapsed: int = 0
    # it has collapsed once: now it is computed by the reference path, and shares nothing with the prefix cache
    is_second_try: bool = False
    # whether the last output has been given
    is_delivered: bool = False
    # gathered since the last output
    _text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)

    @property
    def name(self) -> str:
        """Owner of the blocks."""
        return f"{self.request.id}/{self.index}"

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens of the answer so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """Count of the answer's tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        """Tokens that the next step may compute: none behind the last that may be written."""
        end = len(self.token_ids) + self.num_pending
        return 0 if end >= self.num_prompt_tokens + self.max_tokens else end - self.num_computed

    @property
    def is_shared(self) -> bool:
        """Whether what it computes is kept for others."""
        return self.request.is_kept and not self.is_second_try

    @property
    def is_writing(self) -> bool:
        """Whether its prompt is computed."""
        return self.num_computed >= self.num_prompt_tokens

    def push(self, token_id: int, token_bytes: bytes, logprob: TokenLogprob | None) -> None:
        """Append a token that is text; ends the sequence at a stop string or at max_tokens.

        Sets `num_collapsed` if the guard finds that it has collapsed.
        """
        self.token_ids.append(token_id)
        num_suspect = self.num_collapsed = 0
        if self.guard is not None:
            verdict = self.guard.push(token_id, token_bytes)
            num_suspect = verdict.num_suspect
            self.num_collapsed = num_suspect if verdict.is_collapsed else 0
        self._text.append(self.detokenizer.push(token_id, token_bytes, logprob, num_suspect=num_suspect))
        if self.detokenizer.is_stopped:
            self.finish_reason = FinishReason.STOP
        elif self.num_output_tokens >= self.max_tokens and not self.num_collapsed:
            self.finish(FinishReason.LENGTH)

    def clear(self) -> None:
        """Take a collapse for text after all; ends the sequence at max_tokens."""
        self.num_collapsed = 0
        if self.finish_reason is None and self.num_output_tokens >= self.max_tokens:
            self.finish(FinishReason.LENGTH)

    def drop_collapsed(self) -> int:
        """Take the tokens of a collapse back, but for the few that were given out before they were suspect.

        Returns how many, at least one.
        """
        num_dropped = self.detokenizer.drop(self.num_collapsed)
        assert num_dropped > 0, "the last token of a collapse is held back"
        del self.token_ids[-num_dropped:]
        self.num_collapsed = 0
        return num_dropped

    def finish(self, reason: FinishReason, error: OutputError | None = None) -> None:
        """End the sequence and release the text that was held back."""
        self.finish_reason = reason
        self.error = error
        self._text.append(self.detokenizer.finish())

    def take_output(self) -> Output | None:
        """Give what has become certain since the last call, or None if nothing has."""
        text = "".join(self._text)
        self._text.clear()
        token_ids, logprobs = self.detokenizer.take_tokens()
        if not (text or token_ids or self.finish_reason):
            return None
        self.is_delivered = self.finish_reason is not None
        usage = None
        if self.finish_reason is not None:
            usage = Usage(self.num_prompt_tokens, self.num_output_tokens, self.num_cached or 0)
        return Output(
            self.request.id, self.index, text, token_ids, logprobs, self.finish_reason, usage, error=self.error
        )
