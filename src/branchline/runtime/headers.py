"""Request headers that a gateway reads, and that `HttpModel` or `Client` sends."""

CALL_HEADER = "x-branchline-call"
"""The client's name for a call. A call sent again under the same name resumes the earlier attempt."""
RESUME_HEADER = "x-branchline-resume"
"""The id of a cancelled call that this call resumes."""
MAX_TOKENS_HEADER = "x-branchline-max-tokens"
"""A limit on the answer's length that the session's own sampling cannot raise."""
IDEMPOTENCY_HEADER = "idempotency-key"
"""Random text that identifies a request of the control API. A request that is sent again with the same key has
one effect."""
