"""Token mixers, a folder each: settings, facts, the layer, and the operator in its forms."""
