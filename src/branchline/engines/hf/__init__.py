"""The embedded engine: transformers models on CPU or GPU, many requests decoded in one batch.

A request's life: `engine` checks it and hands it to the one thread that computes; `scheduler` gives it a
row behind the longest prefix whose keys and values are known, computes the rest of its prompt, then samples
one id per step together with all other rows (`rows` holds their keys and values and runs the model,
`sampling` turns logits into ids); when it ends, `prefixes` keeps its keys and values for the next turn.
Before the first request, `trial` has the model show that it can be batched so; `attention` and `linear` are
what it computes with.
"""

from branchline.engines.hf.engine import HfEngine
from branchline.engines.hf.scheduler import HfConfig, HfStats

__all__ = ["HfConfig", "HfEngine", "HfStats"]
