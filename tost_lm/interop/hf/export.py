"""A run of ours as a folder that the Hugging Face library reads, and we as well."""

from pathlib import Path

from safetensors import SafetensorError

from tost_lm.data.tokenizers import find_tokenizer, read_tokenizer
from tost_lm.errors import CheckpointError
from tost_lm.files import discard_aside, folder_aside, publish_folder, write_whole
from tost_lm.interop.hf.model import TostForCausalLM, seal
from tost_lm.interop.hf.tokenizer import fast_tokenizer
from tost_lm.model.checkpoint import find_checkpoint, why_not_written


def export(path: str | Path, folder: str | Path) -> None:
    """Write the model of a run folder, a step folder or an export, with its tokenizer.

    `AutoModelForCausalLM` and `AutoTokenizer` read the folder, and so does everything here that takes an export: our
    tokenizer's file is there too.

    Raises:
        CheckpointError, DataError: the checkpoint or its tokenizer cannot be read, `folder` is there already or cannot
            be written.
    """
    folder, checkpoint = Path(folder), find_checkpoint(Path(path))
    if folder.exists():
        raise CheckpointError(f"{folder}: is there already; give a new folder, or remove it first")
    tokenizer = read_tokenizer(find_tokenizer(checkpoint))
    model = TostForCausalLM.from_run(checkpoint)
    try:
        aside = folder_aside(folder)
        model.save_pretrained(aside)
        fast = fast_tokenizer(tokenizer)
        if fast is None:
            print(f"{folder}: without tokenizer.json, since this SentencePiece model has no equal there")
        else:
            fast.save_pretrained(aside)
        write_whole(aside / tokenizer.file_name, tokenizer.model_bytes)
        seal(aside)
        publish_folder(aside, folder)
    except (OSError, SafetensorError) as error:
        discard_aside(folder)
        raise CheckpointError(f"{folder}: cannot be written: {why_not_written(error)[1]}") from None
