"""Operations that a GPU would launch for a micro-batch of packed documents, counted without a GPU.

    python -m benchmarks.launches

The code runs as on CUDA in bfloat16, on tensors of the CPU whose results are not computed: Triton kernels and flash
attention are counted and return what is in memory. Counted are launches of Triton kernels and operations of torch's
dispatcher, without views and allocations. A fused matrix product is one operation, and an operation may launch several
kernels. The counts depend on the layers and on the documents, not on the width. A second table has the kernels of a
block under torch.compile, as Inductor generates them for a CPU. Output: two tables, and benchmarks/results/.
"""

from typing import Any

from pydantic import Field, PositiveInt

from benchmarks import measure
from tost_lm.config import Section, run_program


class CountConfig(Section):
    """The models and the micro-batch that are counted."""

    models: list[str] = Field(default=["T", "D", "A", "tost-base", "delta-350m"], min_length=1)
    """Layers, by a letter of `model.pattern`, or presets."""
    rows: PositiveInt = 16
    """Rows of a micro-batch, packed into one."""
    seq_len: PositiveInt = 1024
    """Tokens of a row."""
    documents: PositiveInt = 28
    """Documents in all rows, at least as many as these."""


class LaunchesConfig(Section):
    """Settings of `benchmarks.launches`."""

    count: CountConfig = CountConfig()


def run(config: LaunchesConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    from benchmarks.launches_cells import count, count_compiled

    settings = config.count
    cells = [count(name, settings.rows, settings.seq_len, settings.documents) for name in settings.models]
    rows = [
        {
            "": f"one {cell['model']} layer" if len(cell["model"]) == 1 else cell["model"],
            "forward": f"{cell['forward']:,}",
            "backward": f"{cell['backward']:,}",
            "together": f"{cell['forward'] + cell['backward']:,}",
        }
        for cell in cells
    ]
    layers = [count_compiled(name) for name in settings.models if len(name) == 1]
    compiled = [
        {
            "forward + backward": f"one {layer['model']} block, compiled",
            **{name: f"{forward} + {backward}" for name, (forward, backward) in layer["compiled"].items()},
        }
        for layer in layers
    ]
    text = (
        f"{measure.markdown_table(rows)}\n\n{settings.rows} × {settings.seq_len:,} tokens in {cells[0]['documents']} "
        "documents. Operations without views, allocations and the optimizer. Layers are without norm, residual and "
        "MLP.\n\n"
        f"{measure.markdown_table(compiled)}\n\nGenerated kernels, products of matrices and calls of operators of a "
        "block with norms, residuals and MLP. Operators launch what is counted above."
    )
    return [*cells, *layers], text


main = measure.benchmark("launches", run)

if __name__ == "__main__":
    run_program(main, name="benchmarks.launches", doc=__doc__ or "", positional="[CONFIG]", config=LaunchesConfig)
