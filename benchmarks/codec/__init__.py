"""What the codec costs with a real tokenizer: `python -m benchmarks.codec [table …]`."""
