"""Options from one source: fields of a dataclass are a command's arguments, keys of files and variables."""
