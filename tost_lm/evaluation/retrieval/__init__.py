"""Retrieval from long texts: a needle in a haystack by length and depth, and tasks with RULER's structure by length."""
