"""Test doubles that ship: scripted agent behaviours, and a player that runs them against a session."""
