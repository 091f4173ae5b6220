"""Export of a checkpoint to a folder of the Hugging Face library."""

from pathlib import Path

from safetensors import SafetensorError

from tost_lm.checkpointing.format import CARD, write_failure
from tost_lm.errors import CheckpointError
from tost_lm.evaluation.subject import Subject
from tost_lm.files import make_temp_folder, publish_folder, remove_temp_folder, write_atomically
from tost_lm.interop.hf.model import TostForCausalLM, seal
from tost_lm.interop.hf.tokenizer import fast_tokenizer
from tost_lm.training.card import model_card

USAGE = """\
import tost_lm.interop.hf  # registers the model with the Auto classes
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained(".") for kind in (AutoModelForCausalLM, AutoTokenizer))
"""


def export(path: str | Path, folder: str | Path) -> None:
    """Write the model of a run folder, a step folder or an export, with its tokenizer and a model card.

    `AutoModelForCausalLM`, `AutoTokenizer` and every program of this package read the folder. The exported tokenizer
    starts every text with the end-of-text token, as `tost generate` does. The card, README.md, has the records
    of the run and the evaluations of this checkpoint.

    Raises:
        CheckpointError, DataError: the checkpoint or its tokenizer cannot be read, or `folder` exists or cannot be
            written.
        ConfigError: the settings of the run are from another version.
    """
    folder, subject = Path(folder), Subject.find(Path(path))
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; give a new folder, or remove it")
    tokenizer = subject.tokenizer()
    model = TostForCausalLM.from_run(subject.checkpoint)
    fast = fast_tokenizer(tokenizer)
    usage = {} if fast is None else {"usage": USAGE}
    card = model_card(subject.checkpoint, folder.name, subject.home, subject.cited_results(), **usage)
    try:
        aside = make_temp_folder(folder)
        model.save_pretrained(aside)
        if fast is None:
            print(f"{folder}: no tokenizer.json: the Hugging Face library has no equivalent of this tokenizer")
        else:
            fast.save_pretrained(aside)
        (aside / CARD).write_text(card)
        write_atomically(aside / tokenizer.file_name, tokenizer.model_bytes)
        seal(aside)
        publish_folder(aside, folder)
    except (OSError, SafetensorError) as error:
        remove_temp_folder(folder)
        raise CheckpointError(f"{folder}: cannot be written: {write_failure(error)[1]}") from None
