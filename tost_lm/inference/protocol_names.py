"""Names of the evaluations, under which their results are stored. A changed evaluation gets a new name."""

HELDOUT, SAMPLE, TEXT, POSITIONS = "heldout@bpb", "sample", "text@bpb", "positions"

NEEDLE = "needle@words"
VARIABLE_TRACKING = "vt@own-words"
WORD_LISTS = "cwe@own-words", "fwe@own-words"
QUESTIONS = "qa_1@own-words", "qa_2@own-words"
OWN_WORDS = (
    "niah_single_1@own-words",
    "niah_single_2@own-words",
    "niah_single_3@own-words",
    "niah_multikey_1@own-words",
    "niah_multikey_2@own-words",
    "niah_multikey_3@own-words",
    "niah_multivalue@own-words",
    "niah_multiquery@own-words",
    VARIABLE_TRACKING,
    *WORD_LISTS,
    *QUESTIONS,
)
RETRIEVAL_TASKS = (NEEDLE, *OWN_WORDS)
"""All tasks of `tost eval retrieval`, in the order of tables."""
TASK_GROUPS = {"needle": (NEEDLE,), "ruler": OWN_WORDS}

COPYING, CONTEXT_GAIN = "copying@text", "context_gain@text"
MANY_SHOT_SEEN, MANY_SHOT_UNSEEN = "many_shot_seen@own-words", "many_shot_unseen@own-words"
PASSAGES = "passages@own-words"
CONTEXT_TASKS = (COPYING, CONTEXT_GAIN, MANY_SHOT_SEEN, MANY_SHOT_UNSEEN, PASSAGES)
"""All tasks of `tost eval context`, in the order of tables."""
CONTEXT_FACTS = ("distance", "removed", "shots", "passages")
"""Keys that the cells of a task of `tost eval context` have beside its scores."""
