"""Optional packages: which extra each one comes with, and the line that installs an extra here.

`EXTRA_OF` is the only list of them in the code; a test compares it with pyproject.toml and with every import.
An import of one stands in `requires_extra`, or is reached through a block of it: that of the names of
`branchline`, or that around a command.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from branchline.core.errors import MissingExtraError

EXTRA_OF = {
    "httptools": "serve",
    "huggingface_hub": "serve",
    "jinja2": "serve",
    "minijinja": "serve",
    "prometheus_client": "serve",
    "regex": "serve",
    "starlette": "serve",
    "tokenizers": "serve",
    "uvicorn": "serve",
    "uvloop": "serve",
    "gguf": "train",
    "matplotlib": "train",
    "openai": "train",
    "safetensors": "train",
    "torch": "train",
    "transformers": "train",
    "anyio": "agent",
    "docstring_parser": "agent",
    "httpx2": "agent",
    "jsonschema": "agent",
    "mcp": "agent",
    "referencing": "agent",
    "tantivy": "agent",
    "ray": "ray",
    "datasets": "data",
    "pyarrow": "data",
    "transfer_queue": "transferqueue",
    "tensordict": "transferqueue",
    "PIL": "images",
    "renderers": "images",
    "opentelemetry": "otel",
}
"""The extra of each optional package, by the name under which it is imported."""

_CHECKOUT = Path(__file__).resolve().parents[3]


@contextmanager
def requires_extra() -> Iterator[None]:
    """Raises MissingExtraError, with the line that installs it, if an import in the block lacks a package."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        message = f"{package} is not installed: {install_line(EXTRA_OF[package])}"
        raise MissingExtraError(message, name=package) from error


def install_line(extra: str) -> str:
    """The line that installs an extra into the environment of this process, from the current folder.

    In a checkout it names the folder of the checkout: an index need not have a release.
    """
    if not _is_checkout():
        return f"{pip_install()} 'branchline[{extra}]'"
    folder = "." if Path.cwd() == _CHECKOUT else str(_CHECKOUT)
    return f"{pip_install()} -e {shlex.quote(f'{folder}[{extra}]')}"


def _is_checkout() -> bool:
    source = Path(__file__).resolve().parents[2]
    return source == _CHECKOUT / "src" and (_CHECKOUT / "pyproject.toml").is_file()


def pip_install() -> str:
    """`pip install`, if that pip is the one of this environment."""
    import shutil  # slow to import, and only used here

    found = shutil.which("pip")
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        return "pip install"
    below = os.path.relpath(sys.executable)
    python = shlex.quote(sys.executable if below.startswith(os.pardir) else below)
    if find_spec("pip") is None:  # as in an environment that uv made
        return f"uv pip install --python {python}"
    return f"{python} -m pip install"
