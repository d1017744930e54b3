"""Grammars of requests, compiled beside the engine's loop: a large one takes seconds, in which no text may stand still.

llguidance leaves Python's lock while it compiles, so threads do. Invariant: of each request that was begun here and was
not forgotten, exactly one `Compiled` comes.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLMatcher

from llm.errors import RequestRefused
from llm.grammar import GrammarCompiler
from llm.request import Request

# a grammar that takes longer is refused; schemas of ordinary size take tens of milliseconds
COMPILE_S = 20.0
_THREADS = 2
# llguidance goes down a chain of rules by recursion, 8 kB a rule: the most that the API lets through have some 16,000
# rules, and a stack that overflows ends the process. Only what is used of it becomes memory.
_STACK_BYTES = 256 << 20


@dataclass(frozen=True)
class Compiled:
    """A request whose grammar is ready; `matcher` None: refused, by what `error` says."""

    request: Request
    matcher: LLMatcher | None
    error: RequestRefused | None


class GrammarThreads:
    """Compiles in a few threads, and hands what has come of it to `deliver`, from there."""

    def __init__(self, compiler: GrammarCompiler, deliver: Callable[[Compiled], None]) -> None:
        self._compiler = compiler
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        # when each was begun, by id of its request
        self._begun: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, request: Request) -> None:
        """Compile the request's grammar after those that came before it."""
        self._begun[request.id] = time.monotonic()
        # the pool starts its threads as they are needed, here
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._pool.submit(self._work, request)
        finally:
            threading.stack_size(before)

    def forget(self, request_id: str) -> bool:
        """Take a request out: whether it was here."""
        return self._begun.pop(request_id, None) is not None

    def late(self) -> list[str]:
        """List the requests whose grammars have taken too long."""
        oldest = time.monotonic() - COMPILE_S
        return [request_id for request_id, begun_at in self._begun.items() if begun_at < oldest]

    def close(self) -> None:
        """Begin no other; what is being compiled ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, request: Request) -> None:
        if request.id not in self._begun or request.grammar is None:
            return
        try:
            compiled = Compiled(request, self._compiler.compile(request.grammar), None)
        except RequestRefused as error:
            compiled = Compiled(request, None, error)
        except Exception:
            # its traceback may quote the grammar
            unforeseen = RequestRefused("grammar: cannot be compiled", param=request.grammar.param)
            compiled = Compiled(request, None, unforeseen)
        self._deliver(compiled)
