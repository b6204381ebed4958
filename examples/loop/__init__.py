"""Tools, an interaction and generated data for the agent loop."""
