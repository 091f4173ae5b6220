"""AdamW, Muon, parameter groups and learning-rate schedules."""
