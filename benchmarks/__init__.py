"""What Branchline costs, beside references driven in the same run: `python -m benchmarks [table …]`."""
