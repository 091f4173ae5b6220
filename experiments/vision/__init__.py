"""The image classifiers of the Token Statistics Transformer (arXiv 2412.17810): docs/vision.md."""
