"""Devices and types of weights by name, checked before a model is loaded."""

from __future__ import annotations

import torch

from branchline.core.errors import InputError
from branchline.core.suggestions import did_you_mean

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def choose_device(name: str | None) -> str:
    """Returns the device, by default cuda if there is one. Raises InputError for one that cannot be used."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0][:200]
        hint = did_you_mean(name, ("cpu", "cuda", "mps"))
        raise InputError(
            f"device: got {name!r}, expected a device of this machine: cpu, cuda, cuda:1, …{hint} ({reason})"
        ) from error
    return name


def check_dtype(name: str) -> None:
    """Raises InputError for what is no type of weights."""
    dtype = getattr(torch, name, None)
    if name != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        hint = did_you_mean(name, _DTYPES)
        raise InputError(f"dtype: got {name!r}, expected one of {', '.join(_DTYPES)}{hint}")
