"""What a call through the gateway costs, over real HTTP: `python -m benchmarks.gateway [table …]`."""
