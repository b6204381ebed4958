"""Request headers that the gateway understands and `HttpModel` sends."""

CALL_HEADER = "x-branchline-call"
"""The client's own name of a call. The same name again continues the earlier attempt."""
RESUME_HEADER = "x-branchline-resume"
"""The id of a cancelled call that this call continues."""
MAX_TOKENS_HEADER = "x-branchline-max-tokens"
"""A limit on the answer's length that the session's own sampling cannot raise."""
