"""Run in mlflow's own environment: finds a session's traces with mlflow's client and prints them as JSON.

python read_traces.py URL EXPERIMENT SESSION
"""

from __future__ import annotations

import json
import sys
from typing import Any


def read_traces(url: str, experiment: str, session: str) -> dict[str, Any]:
    """The traces of a session, as mlflow keeps them."""
    import mlflow

    mlflow.set_tracking_uri(url)
    found = mlflow.search_traces(
        locations=[experiment],
        filter_string=f"metadata.`mlflow.trace.session` = '{session}'",
        return_type="list",
    )
    return {"version": mlflow.__version__, "traces": [_trace(trace) for trace in found]}


def _trace(trace: Any) -> dict[str, Any]:
    return {
        "id": trace.info.trace_id,
        "state": str(trace.info.state.value),
        "usage": trace.info.token_usage,
        "session": trace.info.trace_metadata.get("mlflow.trace.session"),
        "spans": [_span(span) for span in trace.data.spans],
    }


def _span(span: Any) -> dict[str, Any]:
    return {
        "id": span.span_id,
        "parent": span.parent_id,
        "name": span.name,
        "type": span.span_type,
        "status": span.status.status_code.value,
        "description": span.status.description,
        "start": span.start_time_ns,
        "end": span.end_time_ns,
        "inputs": span.inputs,
        "outputs": span.outputs,
        "attributes": span.attributes,
        "events": [event.name for event in span.events],
    }


if __name__ == "__main__":
    print(json.dumps(read_traces(*sys.argv[1:4]), default=str))
