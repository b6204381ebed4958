"""What commands, of agents and of verifiers, get of a task: variables, and a file for a row of any size."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from branchline.core.errors import InputError
from branchline.rollout.tasks import RolloutTask

_MAX_VARIABLE_BYTES = 128 * 1024
"""Of a name, its value and two more bytes; Linux starts no process with a longer variable."""


@contextmanager
def task_variables(
    command: str, session: str, task: RolloutTask, *, prompt: str | None = None
) -> Iterator[dict[str, str]]:
    """Yields the variables of a command, and keeps the file of BRANCHLINE_TASK_FILE meanwhile.

    A value that no variable can have is left out; the row in the file has it. Raises InputError if the
    command itself names such a variable.
    """
    row = msgspec.json.encode(task.row)
    values = {"BRANCHLINE_TASK": row.decode(), "BRANCHLINE_PROMPT": prompt}
    with tempfile.NamedTemporaryFile(prefix="branchline-task-", suffix=".json") as file:
        file.write(row)
        file.flush()
        yield {
            **{
                name: value
                for name, value in values.items()
                if value is not None and _fits(name, value, command)
            },
            "BRANCHLINE_TASK_FILE": file.name,
            "BRANCHLINE_SESSION": session,
        }


def _fits(name: str, value: str, command: str) -> bool:
    size, most = len(value.encode()), _MAX_VARIABLE_BYTES - len(name) - 2
    has_nul = "\0" in value
    if size <= most and not has_nul:
        return True
    if re.search(rf"{name}\b", command):
        raise InputError(
            f"{name}: got {size:,} bytes{', with NUL' * has_nul}, expected at most {most:,} bytes without "
            "NUL; the file that BRANCHLINE_TASK_FILE names has the whole row"
        )
    return False
