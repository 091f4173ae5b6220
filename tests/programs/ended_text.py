"""Task `text@bpb`, which saves its position after each tile, and whose rank 0 ends by END_BY after END_AFTER tokens."""

import math
import os

from tost_lm.eval.commands import evaluate
from tost_lm.inference import long_text
from tost_lm.inference.long_text import SavedPosition, TextPosition

write_if_due = SavedPosition.write_if_due


def write_and_end(self: SavedPosition, position: TextPosition) -> None:
    write_if_due(self, position)
    if position.tokens >= int(os.environ["END_AFTER"]) and os.environ.get("RANK", "0") == "0":
        os.kill(os.getpid(), int(os.environ["END_BY"]))


if __name__ == "__main__":
    long_text.SAVE_EVERY_S, long_text.LARGEST_SHARE = 0.0, math.inf
    SavedPosition.write_if_due = write_and_end
    evaluate.run()
