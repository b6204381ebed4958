"""Things to run and to copy from."""
