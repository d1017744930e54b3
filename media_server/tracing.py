"""OpenTelemetry spans of one process, where `otlp_url` names a collector; without it every call does next to nothing.

Source: W3C Trace Context; OTLP over HTTP. Spans are linked by the `traceparent` that rows and messages carry: a request
leads to a job (one span an attempt, with a child for each stage), to the delivery of its webhook, and to a text in the
engine. The packages of the extra `tracing` are imported only if the setting is there.

Invariant: an attribute is an id, a name of ours or a number, never a caller's words.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from media_server.errors import ConfigurationError
from media_server.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Attribute = str | int | float | bool
# what is not sent by then, when a process stops, is lost
_CLOSE_MS = 3000


class Span:
    """A span that is open; one of a process without a collector only hands its parent on."""

    def __init__(self, span: Any, traceparent: str | None) -> None:
        self._span = span
        # what work that this span leads to is to carry
        self.traceparent = traceparent

    def rename(self, name: str) -> None:
        """Give it the name that is known only by now."""
        if self._span is not None:
            self._span.update_name(name)

    def set(self, **attributes: Attribute | None) -> None:
        """Add attributes; what is None is left out. An underscore pair stands for a dot."""
        if self._span is not None:
            self._span.set_attributes(_named(attributes))

    def fail(self, code: str) -> None:
        """Say that what it spans has failed, by a code of ours."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, code))


class Tracing:
    """Makes spans; `close` sends the last ones."""

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("media_server", _version())

    @property
    def is_on(self) -> bool:
        """Whether spans go anywhere."""
        return self._tracer is not None

    @contextmanager
    def span(
        self, name: str, parent: str | None, *, kind: Kind = "internal", **attributes: Attribute | None
    ) -> Iterator[Span]:
        """Span the block, under the span that a traceparent names; an exception that leaves it is noted by type."""
        if self._tracer is None:
            yield Span(None, parent)
            return
        span = self._start(name, parent, kind, attributes)
        handle = Span(span, _traceparent(span))
        try:
            yield handle
        except BaseException as error:
            handle.fail(type(error).__name__)
            raise
        finally:
            span.end()

    def record(
        self,
        name: str,
        parent: str | None,
        *,
        start_s: float,
        end_s: float | None = None,
        kind: Kind = "internal",
        error: str | None = None,
        **attributes: Attribute | None,
    ) -> None:
        """Make a span of something that is over; times are unix seconds, the end is now if it is left out."""
        if self._tracer is None:
            return
        span = self._start(name, parent, kind, attributes, start_s)
        if error is not None:
            Span(span, None).fail(error)
        span.end(int((time.time() if end_s is None else end_s) * 1e9))

    def close(self) -> None:
        """Send what is not sent yet."""
        if self._provider is not None:
            self._provider.force_flush(_CLOSE_MS)
            self._provider.shutdown()

    def _start(
        self, name: str, parent: str | None, kind: Kind, attributes: dict[str, Any], start_s: float | None = None
    ) -> Any:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = Context()
        if parent is not None:
            context = TraceContextTextMapPropagator().extract({"traceparent": parent}, context)
        assert self._tracer is not None
        return self._tracer.start_span(
            name,
            context=context,
            kind=SpanKind[kind.upper()],
            attributes=_named(attributes),
            start_time=None if start_s is None else int(start_s * 1e9),
        )


def open_tracing(settings: Settings, process: str, exporter: "SpanExporter | None" = None) -> Tracing:
    """Make a process's tracing: to the collector at `otlp_url`, or to an exporter; to nowhere without either.

    Raises ConfigurationError if the setting is there and the extra `tracing` is not installed.
    """
    if settings.otlp_url is None and exporter is None:
        return Tracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise ConfigurationError(
            "otlp_url needs the packages of the extra `tracing`: pip install 'media-server[tracing]'.",
            param="otlp_url",
            rule="the extra `tracing` is installed",
        ) from error
    if exporter is None:
        assert settings.otlp_url is not None
        # as the specification has it for a base address
        endpoint = f"{settings.otlp_url.rstrip('/')}/v1/traces"
        exporter = OTLPSpanExporter(endpoint=endpoint, headers=settings.otlp_headers, timeout=10)
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.trace_ratio)),
        resource=Resource.create(
            {
                "service.name": "media-server",
                "service.version": _version(),
                "service.instance.id": f"{process}@{socket.gethostname()}:{os.getpid()}",
            }
        ),
        # the process says itself when it ends
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("__", "."): value for name, value in attributes.items() if value is not None}


def _traceparent(span: Any) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _version() -> str:
    try:
        return version("media-server")
    except PackageNotFoundError:
        return "unknown"
