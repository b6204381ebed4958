"""Test doubles that ship with the package: random agent plans, a runner, and a reply encoder."""
