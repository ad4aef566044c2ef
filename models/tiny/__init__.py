"""The embedded checkpoint: the grammar that writes its text, the script that trains it, and its weights."""
