"""TensorFloat-32 rounds the inputs of float32 matrix products, on which statistics must not depend: there are none."""

import re
from pathlib import Path

from agreement import draw_call
from torch.utils._python_dispatch import TorchDispatchMode

from tost_lm.mixers.tssa import triton

PRODUCT = re.compile(r"mm|mv|matmul|dot|einsum|linear|conv")


class CalledOperators(TorchDispatchMode):
    """The names of torch's operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def test_the_operator_in_pytorch_has_no_matrix_products():
    with CalledOperators() as called:
        draw_call(0, (40, 20), 3, 8).run("chunked")
    assert {"mul", "div", "cumsum", "sum"} <= called.names
    assert not {name for name in called.names if PRODUCT.search(name)}


def test_triton_kernels_have_no_matrix_products():
    sources = [path.read_text() for path in Path(triton.__path__[0]).glob("*.py")]
    assert sum("@triton.jit" in source for source in sources) > 1
    assert not [source for source in sources if re.search(r"\bdot(_scaled)?\(", source)]
