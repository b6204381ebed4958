from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("branchline.engines.vllm", "httptools", "serve"),
        ("branchline.engines.sglang", "httptools", "serve"),
        ("branchline.engines.upstream_chat", "httptools", "serve"),
        ("branchline.engines.hf", "torch", "hf"),
        ("branchline.export.parquet", "pyarrow", "parquet"),
    ],
)
def test_missing_package_error_names_the_pip_command(module: str, package: str, extra: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import {module}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.splitlines()[-1] == (
        f"branchline.core.errors.MissingExtraError: {package} is not installed: "
        f"pip install 'branchline[{extra}]'"
    )
