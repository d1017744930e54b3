"""The engine: requests in, tokens out, continuously batched.

    engine.add_request(request)
    while engine.has_work:
        engine.launch()
        for output in engine.collect(): ...

`launch` schedules a step and starts it on the device; `collect` waits for the oldest, takes its tokens and hands out
text. Where steps are scheduled ahead, `launch` starts the next one while this one runs: its newest tokens stay on the
device, and what a token decides on the host (a grammar's mask, penalties, an end) is applied when it is collected, in
time for the draw of the step behind it.
Invariants: a finished or aborted sequence owns no block; when idle, no block is owned.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from llm.chunk import Chunk
from llm.detokenize import Detokenizer
from llm.errors import RequestRefused
from llm.grammar import GrammarCompiler
from llm.guard import Guard
from llm.model_runner import ModelRunner
from llm.offload import OffloadStore
from llm.prefix_cache import BlockChain
from llm.request import FinishReason, Output, Request
from llm.sampling import Draw, Drawn, mix, sample
from llm.scheduler import Scheduled, Scheduler, SchedulerLimits
from llm.sequence import Sequence
from llm.writer import Writer


@dataclass
class _Step:
    """A step on its way: the sequences whose newest token was in it, with the end of each, their logits, the draw."""

    rows: list[tuple[Sequence, int]]
    logits: Tensor
    # the sequences that a token was drawn for, in the order of `drawn`
    sampled: list[Sequence] = field(default_factory=list)
    drawn: Drawn | None = None


class Engine:
    """One model and the sequences that it writes."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: LLTokenizer,
        eos_token_ids: tuple[int, ...],
        limits: SchedulerLimits | None = None,
        *,
        offload_bytes: int = 0,
        has_guard: bool = True,
    ) -> None:
        """Serve `runner`'s model; a draw needs the tokens before it, so at most one step is ahead of another.

        `offload_bytes`: CPU memory for the keys and values of preempted sequences; 0: they are computed anew.
        `has_guard`: guard against collapses the requests that ask for it.
        """
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.context_length = runner.context_length
        offload = OffloadStore(runner.kv_cache, offload_bytes) if offload_bytes else None
        self.scheduler = Scheduler(runner.kv_cache, limits or SchedulerLimits(), offload)
        self.grammars = GrammarCompiler(tokenizer)
        self.writer = Writer(tokenizer, eos_token_ids, self.scheduler)
        self.has_guard = has_guard
        self._sequences: dict[str, list[Sequence]] = {}
        assert 1 <= self.scheduler.limits.steps_ahead <= 2, "one step or two may be on their way"
        self._steps: deque[_Step] = deque()
        self._next_number = 0
        # choices at temperature 0, and those of them that another batch might make otherwise (`llm.near_ties`)
        self.num_greedy = 0
        self.num_near_ties = 0

    @property
    def has_work(self) -> bool:
        """Whether a step is on its way or a sequence is not finished."""
        return bool(self._steps or self._sequences)

    @property
    def num_running(self) -> int:
        """Sequences that own blocks."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks."""
        return len(self.scheduler.waiting)

    def add_request(self, request: Request, matcher: LLMatcher | None = None) -> None:
        """Queue a request; its n answers are sequences of their own.

        matcher: its grammar, if `grammars` has compiled it already (in another thread, say); None: it is compiled here.
        Raises RequestRefused, naming field, rule and value, if a parameter is out of range, the id is in use, the
        prompt does not fit the context or the pool, or the grammar is malformed or not supported.
        """
        sampling = request.sampling
        sampling.check(self.runner.vocab_size)
        if request.id in self._sequences:
            raise RequestRefused(f"id: {request.id} is already running", param="id")
        max_tokens = self._max_tokens(request)
        if matcher is None and request.grammar is not None:
            matcher = self.grammars.compile(request.grammar)
        sequences = []
        for index in range(sampling.n):
            sequence = Sequence(
                request=request,
                index=index,
                seed=sampling.seed if index == 0 else mix(sampling.seed + index),
                max_tokens=max_tokens,
                matcher=None if matcher is None else matcher.deep_copy(),
                detokenizer=Detokenizer(sampling.stop),
                number=self._next_number,
                chain=BlockChain(request.cache_salt, self.scheduler.kv_cache.block_size),
                guard=Guard(in_grammar=matcher is not None) if self.has_guard and sampling.collapse_guard else None,
            )
            self._next_number += 1
            self.writer.push_forced(sequence)
            sequences.append(sequence)
        # all or none of them
        for sequence in sequences:
            # a grammar may have written the whole answer already
            if sequence.finish_reason is None:
                self.scheduler.add(sequence)
        self._sequences[request.id] = sequences

    def abort(self, request_id: str) -> bool:
        """End a request now and free its blocks; False if it is not running. No output follows.

        A step that is on its way may still write to the blocks; whoever gets them next writes after it.
        """
        sequences = self._sequences.pop(request_id, None)
        for sequence in sequences or ():
            if sequence.finish_reason is None:
                sequence.finish(FinishReason.ABORT)
            self.scheduler.remove(sequence)
        return sequences is not None

    def launch(self) -> None:
        """Schedule and start steps, until as many are on their way as may be."""
        while len(self._steps) < self.scheduler.limits.steps_ahead:
            scheduled = self.scheduler.schedule()
            if not scheduled:
                return
            self._steps.append(self._start(scheduled))
            if len(self._steps) == 1:
                self._draw(self._steps[0])

    def collect(self) -> list[Output]:
        """Finish the oldest step: take the tokens drawn in it, and give what became certain of each sequence."""
        if self._steps:
            step = self._steps.popleft()
            assert step.drawn is not None or not step.sampled
            results = []
            if step.drawn is not None:
                results = step.drawn.read()
                self.num_greedy += step.drawn.num_greedy
                self.num_near_ties += step.drawn.num_near_ties
            for sequence, result in zip(step.sampled, results, strict=True):
                sequence.num_pending = 0
                # an abort may have come meanwhile
                if sequence.finish_reason is None:
                    self.writer.take(sequence, result)
        outputs = [output for sequence in self._active() if (output := sequence.take_output()) is not None]
        self._remove_finished()
        if self._steps:
            # all that its draw depends on is known now
            self._draw(self._steps[0])
        elif not self._sequences:
            self.check_idle()
        return outputs

    def check_idle(self) -> None:
        """Raise IntegrityError if a block is owned although nothing runs, or is not accounted for."""
        self.scheduler.kv_cache.check(set())
        if self.scheduler.offload is not None:
            self.scheduler.offload.check(set())

    def _start(self, scheduled: list[Scheduled]) -> _Step:
        """Run the model on what was scheduled; the newest tokens of the step in front come from the device."""
        chunks = []
        rows = []
        # those on their second try are run apart, so that the others keep their kernels
        scheduled = sorted(scheduled, key=lambda item: item.sequence.is_second_try)
        num_first = sum(not item.sequence.is_second_try for item in scheduled)
        for item in scheduled:
            sequence, start = item.sequence, item.sequence.num_computed
            end = start + item.num_tokens
            assert sequence.blocks is not None
            is_last = end == len(sequence.token_ids) + sequence.num_pending
            fed_row = sequence.pending_row if end > len(sequence.token_ids) else None
            chunks.append(Chunk(sequence.token_ids[start:end], start, sequence.blocks, is_last, fed_row))
            sequence.num_computed = end
            if is_last:
                rows.append((sequence, end))
        in_front = self._steps[-1].drawn if self._steps else None
        fed = None if in_front is None else in_front.token_ids
        if num_first == len(chunks):
            logits = self.runner.forward(chunks, fed)
        else:
            parts = [self.runner.forward(chunks[:num_first], fed)] if num_first else []
            logits = torch.cat([*parts, self.runner.forward(chunks[num_first:], fed, is_reference=True)])
        # what a step writes can be read by the next one
        for item in scheduled:
            self.scheduler.store(item.sequence)
        return _Step(rows, logits)

    def _draw(self, step: _Step) -> None:
        """Draw a token for each sequence whose newest token the step computed; not where a grammar has forced more."""
        places = [
            row
            for row, (sequence, end) in enumerate(step.rows)
            if sequence.finish_reason is None and end == len(sequence.token_ids)
        ]
        step.sampled = [step.rows[row][0] for row in places]
        if not places:
            return
        is_whole = len(places) == step.logits.shape[0]
        step.drawn = sample(
            step.logits if is_whole else step.logits[places],
            [self._draw_of(item) for item in step.sampled],
            near_ties_of=None if self.runner.is_invariant else self.runner.model.dtype,
        )
        for row, sequence in enumerate(step.sampled):
            sequence.num_pending, sequence.pending_row = 1, row

    def _max_tokens(self, request: Request) -> int:
        prompt, asked, context = len(request.prompt_token_ids), request.sampling.max_tokens, self.context_length
        if not prompt:
            raise RequestRefused("prompt must have at least one token, got none", param="prompt")
        if bad := [token for token in request.prompt_token_ids if not 0 <= token < self.runner.vocab_size]:
            rule = f"token ids from 0 to {self.runner.vocab_size - 1}"
            raise RequestRefused(f"prompt must be {rule}, got {bad[0]}", param="prompt")
        if prompt >= context or prompt + (asked or 1) > context:
            wish = "" if asked is None else f" and max_tokens is {asked}"
            raise RequestRefused(
                f"The model's context is {context} tokens; the prompt has {prompt}{wish}.",
                param="prompt" if prompt >= context else "max_tokens",
                code="context_length_exceeded",
            )
        max_tokens = context - prompt if asked is None else asked
        step_tokens = self.scheduler.limits.max_step_tokens
        if not self.scheduler.kv_cache.can_hold_one(prompt + max_tokens, step_tokens):
            raise RequestRefused(
                f"This engine holds {self.scheduler.kv_cache.num_tokens} tokens; the prompt has {prompt} and "
                f"max_tokens is {max_tokens}.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return max_tokens

    def _draw_of(self, sequence: Sequence) -> Draw:
        allowed = None if sequence.matcher is None else bytes(sequence.matcher.compute_bitmask())
        params = sequence.request.sampling
        is_early = sequence.num_output_tokens < params.min_tokens
        return Draw(
            params=params,
            seed=sequence.seed,
            position=sequence.num_output_tokens,
            output_token_ids=sequence.output_token_ids,
            prompt_token_ids=sequence.request.prompt_token_ids,
            allowed=allowed,
            forbidden=(*self.eos_token_ids, *params.stop_token_ids) if is_early else (),
        )

    def _active(self) -> list[Sequence]:
        """List the sequences that still have an output to give."""
        return [item for sequences in self._sequences.values() for item in sequences if not item.is_delivered]

    def _remove_finished(self) -> None:
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.finish_reason is not None:
                self.scheduler.remove(sequence)
        for request_id, sequences in list(self._sequences.items()):
            if all(sequence.finish_reason is not None for sequence in sequences):
                del self._sequences[request_id]
