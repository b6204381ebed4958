"""What a served gateway tells of itself: log lines always, spans where an exporter is configured."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from branchline.gateway.logs import LogFormat, LogLevel, configure_logging

if TYPE_CHECKING:
    from branchline.gateway.tracing import Tracing
    from branchline.runtime.call_record import CallObserver
    from branchline.runtime.managed_session import SessionObserver

log = logging.getLogger("branchline.tracing")

OTLP_ENDPOINT_ENV = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True)
class Observability:
    """Those who watch a gateway."""

    observers: Sequence[CallObserver]
    tracing: Tracing | None = None

    @property
    def on_end(self) -> Sequence[SessionObserver]:
        return () if self.tracing is None else (self.tracing.record_session_end,)

    def close(self) -> None:
        """Sends the last spans, or gives up after a while."""
        if self.tracing is not None:
            self.tracing.close()


def add_observability_options(parser: argparse.ArgumentParser) -> None:
    """Registers the options of logs; traces are configured by OpenTelemetry's own variables."""
    parser.add_argument(
        "--log-format",
        choices=get_args(LogFormat),
        default="text",
        help="how log lines are written (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        choices=get_args(LogLevel),
        default="info",
        help="info has a line for each call, warning for each that failed (default: %(default)s)",
    )
    parser.add_argument(
        "--log-contents", action="store_true", help="log what agents and models say; without it nothing is"
    )


def configure_observability(options: argparse.Namespace) -> Observability:
    """Sets up what the options and the environment ask for."""
    note_call = configure_logging(options.log_format, options.log_level, options.log_contents)
    if not is_exporter_configured(os.environ):
        return Observability((note_call,))
    try:
        from branchline.gateway.tracing import Tracing
    except ImportError as error:
        # The variables are often set for everything on a machine; that must not keep this from starting.
        log.warning("no traces: %s is missing, pip install 'branchline[otel]'", error.name)
        return Observability((note_call,))
    tracing = Tracing.from_environment()
    return Observability((note_call, tracing.record_call), tracing)


def is_exporter_configured(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables name a place for traces and do not forbid them."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp" and any(map(environ.get, OTLP_ENDPOINT_ENV))
