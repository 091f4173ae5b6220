"""The watchdog: if a rank fails, dies, hangs or stops answering, all ranks end the run with one line that names it."""
