"""Logs and traces of `branchline serve`: log lines always, spans if an OTLP exporter is configured."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from branchline.core.extras import install_line

if TYPE_CHECKING:  # Tracing needs the `otel` extra
    from branchline.gateway.tracing import Tracing
    from branchline.runtime.call_record import CallObserver
    from branchline.runtime.managed_session import SessionObserver

log = logging.getLogger("branchline.tracing")

OTLP_ENDPOINT_ENV = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True)
class Observability:
    """The observers of a served gateway."""

    observers: Sequence[CallObserver]
    tracing: Tracing | None = None

    @property
    def on_end(self) -> Sequence[SessionObserver]:
        return () if self.tracing is None else (self.tracing.record_session_end,)

    def close(self) -> None:
        """Sends the remaining spans; gives up after the exporter's timeout."""
        if self.tracing is not None:
            self.tracing.close()


def add_observability_options(parser: argparse.ArgumentParser) -> None:
    """Adds the logging options. Traces have none: OpenTelemetry's environment variables configure them."""
    group = parser.add_argument_group("logging")
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="format of log lines (default: %(default)s)",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="info logs every call, warning only failed ones (default: %(default)s)",
    )
    group.add_argument(
        "--log-contents", action="store_true", help="log message texts too; by default they are left out"
    )


def configure_observability(options: argparse.Namespace) -> Observability:
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
