"""The cost of a call through the gateway, over real HTTP: `python -m benchmarks.gateway [table …]`."""
