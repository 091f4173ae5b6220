"""Retrieval from long texts: a needle in a haystack by length and depth, and tasks of RULER's structure by length."""
