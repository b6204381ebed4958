"""The embedded engine: transformers models on CPU or GPU, many requests decoded in one batch.

The life of a request: `engine` validates it and passes it to the one thread that computes. `scheduler` gives
it a row of the batch, reuses the longest prefix whose keys and values are known, computes the rest of its
prompt, then samples one id per step together with all other rows (`kv_cache` holds keys and values and runs
the model, `sampling` turns logits into ids). When it ends, `prefix_cache` keeps its keys and values for the
next turn. Before the first request, `compatibility` checks that the model can be batched this way;
`attention` replaces its attention function.
"""

from branchline.core.extras import requires_extra

with requires_extra():
    from branchline.engines.hf.engine import HfEngine
    from branchline.engines.hf.scheduler import HfConfig, HfStats

__all__ = ["HfConfig", "HfEngine", "HfStats"]
