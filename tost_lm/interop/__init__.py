"""Models as other libraries want to have them."""
