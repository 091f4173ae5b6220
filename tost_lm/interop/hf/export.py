"""Export of a checkpoint to a folder of the Hugging Face library."""

from pathlib import Path

from safetensors import SafetensorError

from tost_lm.data.tokenizers import find_tokenizer, read_tokenizer
from tost_lm.errors import CheckpointError
from tost_lm.files import make_temp_folder, publish_folder, remove_temp_folder, write_atomically
from tost_lm.interop.hf.model import TostForCausalLM, seal
from tost_lm.interop.hf.tokenizer import fast_tokenizer
from tost_lm.model.checkpoint import find_checkpoint, write_failure


def export(path: str | Path, folder: str | Path) -> None:
    """Write the model of a run folder, a step folder or an export, with its tokenizer.

    `AutoModelForCausalLM`, `AutoTokenizer` and every program of this package read the folder. The exported tokenizer
    starts every text with the end-of-text token, as `tost generate` does.

    Raises:
        CheckpointError, DataError: the checkpoint or its tokenizer cannot be read, or `folder` exists or cannot be
            written.
    """
    folder, checkpoint = Path(folder), find_checkpoint(Path(path))
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; give a new folder, or remove it")
    tokenizer = read_tokenizer(find_tokenizer(checkpoint))
    model = TostForCausalLM.from_run(checkpoint)
    try:
        aside = make_temp_folder(folder)
        model.save_pretrained(aside)
        fast = fast_tokenizer(tokenizer)
        if fast is None:
            print(f"{folder}: no tokenizer.json: the Hugging Face library has no equivalent of this tokenizer")
        else:
            fast.save_pretrained(aside)
        write_atomically(aside / tokenizer.file_name, tokenizer.model_bytes)
        seal(aside)
        publish_folder(aside, folder)
    except (OSError, SafetensorError) as error:
        remove_temp_folder(folder)
        raise CheckpointError(f"{folder}: cannot be written: {write_failure(error)[1]}") from None
