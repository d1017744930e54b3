"""What becomes of a drawn token: text, an end, what a grammar forces behind it, or a collapse and a second try.

A collapse (llm.guard) is answered once: what was held back is dropped, and the sequence goes on from where it was
clean, with all keys and values computed anew by the reference path, none of them from the prefix cache. Draws depend on
seed and position, so right probabilities give the same text again: then the model does repeat itself, and the sequence
ends with FinishReason.COLLAPSE.
"""

import logging

from llguidance import LLMatcher, LLTokenizer

from llm.grammar import too_complex
from llm.guard import Guard
from llm.prefix_cache import BlockChain
from llm.request import FinishReason, OutputError, TokenLogprob
from llm.scheduler import Scheduler
from llm.sequence import Sequence

logger = logging.getLogger(__name__)


class Writer:
    """Appends to sequences, and counts collapses: `num_second_tries` begun, `num_collapsed` that ended so."""

    def __init__(self, tokenizer: LLTokenizer, eos_token_ids: tuple[int, ...], scheduler: Scheduler) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.scheduler = scheduler
        self.num_second_tries = 0
        self.num_collapsed = 0

    def take(self, sequence: Sequence, result: tuple[int, TokenLogprob | None] | None) -> None:
        """Take what was drawn for a sequence, None where no finite logit was left."""
        if sequence.matcher is not None and sequence.matcher.is_error():
            # its mask allows an end, which the grammar does not
            self._end_grammar(sequence)
        elif result is None:
            logger.warning("request %s: no finite logits are left", sequence.request.id)
            sequence.finish(FinishReason.ERROR, OutputError("The model gave no finite probabilities."))
            self.scheduler.remove(sequence, is_sound=False)
        else:
            self._push(sequence, *result)

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
        if sequence.num_collapsed and sequence.finish_reason is None:
            if sequence.matcher is None or not _is_ruled(sequence.matcher, token_id):
                self._try_again(sequence)
                return
            sequence.clear()
        if sequence.finish_reason is None:
            self.push_forced(sequence)

    def push_forced(self, sequence: Sequence) -> None:
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
            # whatever is repeated so, it is not the model's doing
            sequence.clear()
            if sequence.finish_reason is not None:
                return
        if matcher.is_stopped():
            if matcher.is_error():
                self._end_grammar(sequence)
            else:
                sequence.finish(FinishReason.STOP)

    def _try_again(self, sequence: Sequence) -> None:
        """Drop a collapse, and begin the second try; after that one end the sequence."""
        num_dropped = sequence.drop_collapsed()
        # its keys and values may be what is wrong: nobody else gets them
        self.scheduler.remove(sequence, is_sound=False)
        name, position = sequence.name, sequence.num_output_tokens
        if sequence.is_second_try:
            logger.warning("request %s: collapsed again at token %d", name, position)
            self.num_collapsed += 1
            sequence.finish(FinishReason.COLLAPSE)
            return
        logger.warning("request %s: collapsed at token %d, tried again", name, position)
        self.num_second_tries += 1
        if sequence.matcher is not None:
            sequence.matcher.rollback(num_dropped)
        sequence.is_second_try = True
        sequence.chain = BlockChain(sequence.request.cache_salt, self.scheduler.kv_cache.block_size)
        sequence.guard = Guard(in_grammar=sequence.matcher is not None)
        for token_id in sequence.output_token_ids:
            sequence.guard.push(token_id, self._bytes_of(token_id))
        self.scheduler.add(sequence)

    def _end_grammar(self, sequence: Sequence) -> None:
        """End a sequence whose grammar needs more than llguidance's limits allow."""
        grammar, matcher = sequence.request.grammar, sequence.matcher
        assert grammar is not None and matcher is not None
        logger.info("request %s: the %s is too complex", sequence.request.id, grammar.type)
        refused = too_complex(grammar, matcher)
        sequence.finish(FinishReason.ERROR, OutputError(refused.message, "grammar_too_complex", refused.param))

    def _push_text(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        sequence.push(token_id, self._bytes_of(token_id), logprob)

    def _bytes_of(self, token_id: int) -> bytes:
        return b"" if self.tokenizer.is_special_token(token_id) else self.tokenizer.decode_bytes([token_id])


def _is_ruled(matcher: LLMatcher, token_id: int) -> bool:
    """Whether a grammar ends with the token that it has just taken, or left no choice about it."""
    if matcher.is_stopped():
        return True
    before = matcher.deep_copy()
    before.rollback(1)
    return before.compute_ff_tokens()[:1] == [token_id]
