"""Long-Range Arena (arXiv 2011.04006): its tasks, and encoders of several mixers trained and tested on one."""
