"""The engine: requests in, tokens out, continuously batched.

    engine.add_request(request)
    while engine.has_work:
        engine.launch()
        for output in engine.collect(): ...

`launch` schedules a step and starts it on the device; `collect` waits for it, draws tokens and hands out text.
Invariants: a step computes each token once; a finished or aborted sequence owns no place; when idle, no place is owned.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer
from torch import Tensor

from llm.detokenize import Detokenizer
from llm.errors import CheckpointError, RequestRefused
from llm.grammar import GrammarCompiler, too_complex
from llm.kv_cache import KvCache
from llm.model_runner import Chunk, ModelRunner, free_memory_bytes, load_model, plan_kv_tokens
from llm.request import FinishReason, Output, OutputError, Request, TokenLogprob
from llm.sampling import Draw, allowed_tokens, mix, sample
from llm.scheduler import Scheduled, Scheduler, SchedulerLimits
from llm.sequence import Sequence

logger = logging.getLogger(__name__)

# 2026-11, one thread of an AMD EPYC, SmolLM2-135M fp32: steps of 64, 128 and 256 prompt tokens hold the running answers
# up for 0.31, 0.57 and 1.07 s and read 209, 223 and 239 tokens/s
CPU_LIMITS = SchedulerLimits(max_sequences=32, max_step_tokens=128)
GPU_LIMITS = SchedulerLimits(max_sequences=128, max_step_tokens=4096)
# a CPU shares its memory with everything else, and is slow long before so many tokens
MAX_CPU_KV_TOKENS = 16384


@dataclass(frozen=True)
class _Step:
    """A step on its way: what was scheduled, and the logits of those whose last token was in it."""

    scheduled: list[Scheduled]
    sampled: list[Sequence]
    logits: Tensor


class Engine:
    """One model and the sequences that it writes."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: LLTokenizer,
        eos_token_ids: tuple[int, ...],
        limits: SchedulerLimits | None = None,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.context_length = runner.context_length
        self.scheduler = Scheduler(runner.kv_cache, limits or SchedulerLimits())
        self.grammars = GrammarCompiler(tokenizer)
        self._sequences: dict[str, list[Sequence]] = {}
        self._step: _Step | None = None
        self._next_number = 0

    @property
    def has_work(self) -> bool:
        """Whether a step is on its way or a sequence is not finished."""
        return self._step is not None or bool(self._sequences)

    @property
    def num_running(self) -> int:
        """Sequences that own places."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for places."""
        return len(self.scheduler.waiting)

    def add_request(self, request: Request) -> None:
        """Queue a request; its n answers are sequences of their own.

        Raises RequestRefused, naming field, rule and value, if a parameter is out of range, the id is in use, the
        prompt does not fit the context or the pool, or the grammar is malformed or not supported.
        """
        sampling = request.sampling
        sampling.check(self.runner.vocab_size)
        if request.id in self._sequences:
            raise RequestRefused(f"id: {request.id} is already running", param="id")
        max_tokens = self._max_tokens(request)
        matcher = None if request.grammar is None else self.grammars.compile(request.grammar)
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
            )
            self._next_number += 1
            self._push_forced(sequence)
            sequences.append(sequence)
        # all or none of them
        for sequence in sequences:
            self.scheduler.add(sequence)
        self._sequences[request.id] = sequences

    def abort(self, request_id: str) -> bool:
        """End a request now and free its places; False if it is not running. No output follows."""
        sequences = self._sequences.pop(request_id, None)
        for sequence in sequences or ():
            if sequence.finish_reason is None:
                sequence.finish(FinishReason.ABORT)
            # one that has ended waits for its output to be collected, its places are free already
            if sequence in self.scheduler.running or sequence in self.scheduler.waiting:
                self.scheduler.remove(sequence)
        return sequences is not None

    def launch(self) -> None:
        """Schedule a step and start it."""
        assert self._step is None, "the step before must be collected first"
        scheduled = [item for item in self.scheduler.schedule() if item.sequence.finish_reason is None]
        chunks = []
        sampled = []
        for item in scheduled:
            sequence, start = item.sequence, item.sequence.num_computed
            end = start + item.num_tokens
            assert sequence.interval is not None
            is_last = end == len(sequence.token_ids)
            chunks.append(Chunk(sequence.token_ids[start:end], start, sequence.interval, is_last))
            sequence.num_computed = end
            if is_last:
                sampled.append(sequence)
        if chunks:
            self._step = _Step(scheduled, sampled, self.runner.forward(chunks))

    def collect(self) -> list[Output]:
        """Finish the step: draw a token for each sequence that is due, and give what became certain of each."""
        step, self._step = self._step, None
        if step is not None:
            # an abort may have come meanwhile
            rows = [row for row, sequence in enumerate(step.sampled) if sequence.finish_reason is None]
            live = [step.sampled[row] for row in rows]
            drawn = sample(step.logits[rows], [self._draw(sequence) for sequence in live]) if live else []
            for sequence, result in zip(live, drawn, strict=True):
                if sequence.matcher is not None and sequence.matcher.is_error():
                    # its mask allows an end, which the grammar does not
                    self._end_grammar(sequence)
                elif result is None:
                    logger.warning("request %s: no finite logits are left", sequence.request.id)
                    sequence.finish(FinishReason.ERROR, OutputError("The model gave no finite probabilities."))
                else:
                    self._push(sequence, *result)
        outputs = [output for sequence in self._active() if (output := sequence.take_output()) is not None]
        self._remove_finished()
        if not self._sequences:
            self.check_idle()
        return outputs

    def check_idle(self) -> None:
        """Raise IntegrityError if a place is owned although nothing runs."""
        self.scheduler.kv_cache.check(set())

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
        if prompt + max_tokens > self.scheduler.kv_cache.num_tokens:
            raise RequestRefused(
                f"This engine holds {self.scheduler.kv_cache.num_tokens} tokens; the prompt has {prompt} and "
                f"max_tokens is {max_tokens}.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return max_tokens

    def _draw(self, sequence: Sequence) -> Draw:
        allowed = None
        if sequence.matcher is not None:
            allowed = allowed_tokens(sequence.matcher.compute_bitmask(), self.runner.vocab_size, self.runner.device)
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

    def _push(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        """Take a drawn token: an end, or text, after which a grammar may force more."""
        params = sequence.request.sampling
        is_end = token_id in params.stop_token_ids or (token_id in self.eos_token_ids and not params.ignore_eos)
        if is_end or (sequence.matcher is not None and token_id in self.eos_token_ids):
            sequence.token_ids.append(token_id)
            sequence.finish(FinishReason.STOP)
            return
        if sequence.matcher is not None:
            is_taken = sequence.matcher.consume_token(token_id)
            if not is_taken:
                self._end_grammar(sequence)
                return
        self._push_text(sequence, token_id, logprob)
        if sequence.finish_reason is None:
            self._push_forced(sequence)

    def _push_forced(self, sequence: Sequence) -> None:
        """Take what the grammar leaves no choice about, without drawing it; ends where the grammar does."""
        matcher = sequence.matcher
        if matcher is None:
            return
        # forced tokens have no logits of their own, so whoever wants logprobs draws each
        forced = [] if sequence.request.sampling.logprobs is not None else matcher.compute_ff_tokens()
        for token_id in forced:
            if token_id in self.eos_token_ids or not matcher.consume_token(token_id):
                break
            self._push_text(sequence, token_id, None)
            if sequence.finish_reason is not None:
                return
        if matcher.is_stopped():
            if matcher.is_error():
                self._end_grammar(sequence)
            else:
                sequence.finish(FinishReason.STOP)

    def _end_grammar(self, sequence: Sequence) -> None:
        """End a sequence whose grammar needs more than llguidance's limits allow."""
        grammar, matcher = sequence.request.grammar, sequence.matcher
        assert grammar is not None and matcher is not None
        logger.info("request %s: the %s is too complex", sequence.request.id, grammar.type)
        refused = too_complex(grammar, matcher)
        sequence.finish(FinishReason.ERROR, OutputError(refused.message, "grammar_too_complex", refused.param))

    def _push_text(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        is_special = self.tokenizer.is_special_token(token_id)
        sequence.push(token_id, b"" if is_special else self.tokenizer.decode_bytes([token_id]), logprob)

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


def load_engine(
    folder: Path,
    device: str,
    *,
    kv_tokens: int | None = None,
    limits: SchedulerLimits | None = None,
) -> Engine:
    """Load a transformers folder as an engine.

    Args:
        folder: config.json, safetensors, tokenizer.json.
        device: "cpu" or "cuda:N".
        kv_tokens: places in the pool of keys and values, for all sequences together; None: what memory holds, on a
            CPU at most MAX_CPU_KV_TOKENS.

    Raises:
        CheckpointError: files are missing or damaged.
        UnsupportedModel: the architecture would be computed wrongly.
    """
    model = load_model(folder, device)
    if kv_tokens is None:
        kv_tokens = plan_kv_tokens(model, free_memory_bytes(device))
        if device == "cpu":
            kv_tokens = min(kv_tokens, MAX_CPU_KV_TOKENS)
    if limits is None:
        limits = CPU_LIMITS if device == "cpu" else GPU_LIMITS
    runner = ModelRunner(model, KvCache(kv_tokens))
    eos_token_ids = _eos_token_ids(runner)
    try:
        text = (folder / "tokenizer.json").read_text()
        tokenizer = LLTokenizer(text, n_vocab=runner.vocab_size, eos_token=list(eos_token_ids))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder.name}: tokenizer.json cannot be read: {error}") from error
    return Engine(runner, tokenizer, eos_token_ids, limits)


def _eos_token_ids(runner: ModelRunner) -> tuple[int, ...]:
    """Take the ends that the generation configuration names, or the model's own."""
    generation = runner.model.generation_config
    eos = generation.eos_token_id if generation is not None else None
    if eos is None:
        eos = runner.model.config.get_text_config().eos_token_id
    if eos is None:
        raise CheckpointError("The model names no end-of-text token, so no answer would ever end.")
    return (eos,) if isinstance(eos, int) else tuple(eos)
