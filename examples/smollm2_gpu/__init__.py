"""Trains SmolLM2-135M on a GPU to use tools, through the gateway."""
