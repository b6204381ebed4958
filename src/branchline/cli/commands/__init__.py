"""The commands: for each one, its options and its texts. What it does is imported when it runs."""
