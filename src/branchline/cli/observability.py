"""Logs and traces of a command that runs a gateway: log lines always, spans if an OTLP exporter is set."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from branchline.core.choices import LogFormat, LogLevel
from branchline.core.extras import install_line
from branchline.core.option_fields import option

if TYPE_CHECKING:  # Tracing needs the `otel` extra
    from branchline.gateway.tracing import Tracing
    from branchline.runtime.call_record import CallObserver
    from branchline.runtime.managed_session import SessionObserver

log = logging.getLogger("branchline.tracing")

OTLP_ENDPOINT_ENV = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True)
class ObservabilityOptions:
    """Log lines. Traces have no options: OpenTelemetry's environment variables configure them."""

    log_format: LogFormat = "text"
    """Format of log lines."""
    log_level: LogLevel = option("info", basic=True)
    """info logs every call, warning only failed ones."""
    log_contents: bool = False
    """Log message texts too; by default they are left out."""


def quiet_logs() -> ObservabilityOptions:
    """The defaults of commands that show their own progress."""
    return ObservabilityOptions(log_level="warning")


@dataclass(frozen=True)
class Observability:
    """The observers of a served gateway."""

    observers: Sequence[CallObserver]
    tracing: Tracing | None = None

    @property
    def on_end(self) -> Sequence[SessionObserver]:
        return () if self.tracing is None else (self.tracing.record_session_end,)

    def close(self) -> None:
        """Sends the remaining spans, for as long as the exporter's timeout; removes what logs them."""
        from branchline.gateway.logs import reset_logging

        try:
            if self.tracing is not None:
                self.tracing.close()
        finally:
            reset_logging()


def configure_observability(options: ObservabilityOptions) -> Observability:
    """Configures logging by the options and tracing by the environment."""
    from branchline.gateway.logs import configure_logging

    log_call = configure_logging(options.log_format, options.log_level, options.log_contents)
    if not is_exporter_configured(os.environ):
        return Observability((log_call,))
    try:
        from branchline.gateway.tracing import Tracing
    except ImportError as error:
        # These variables are often set for a whole machine, so a missing package is not an error.
        log.warning("no traces: %s is missing, %s", error.name, install_line("otel"))
        return Observability((log_call,))
    tracing = Tracing.from_environment()
    return Observability((log_call, tracing.record_call), tracing)


def is_exporter_configured(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables name an OTLP endpoint and do not disable traces."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp" and any(map(environ.get, OTLP_ENDPOINT_ENV))
