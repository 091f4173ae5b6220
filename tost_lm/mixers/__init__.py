"""Token mixers, a folder each: settings, spec, the layer, and the operator in its forms."""
