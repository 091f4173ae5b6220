"""The watchdog: when a rank fails, dies, hangs or stops answering, every rank ends the run with one line that names it.

`watch` runs a rank's watchdog thread, `heartbeat` records its step and phase, `poll` collects the status of all ranks,
`messages` sends short texts between background threads, `store` is their key-value store, and `flight_recorder` dumps
the last collectives of a rank.
"""
