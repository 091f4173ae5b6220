"""AdamW, its parameter groups and its schedule."""
