"""torch's record of a rank's last collectives, dumped before the watchdog ends the process."""

import faulthandler
import os
import pickle
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

DUMP_S = 1.0  # a file system may hang
GIL_S = 2.0  # a hung GPU too, while the dump holds the GIL; then no Python code can end the process
RECORDS = 2000
_PREFIX = "TORCH_FR_DUMP_TEMP_FILE"  # torch's variable: NCCL writes here too if it ends a process first


def enable_flight_recorder(folder: Path) -> None:
    """Record collectives, and dump them to FOLDER/rank_N. Call it before the process group is created."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDS))
    os.environ.setdefault(_PREFIX, str(folder.absolute() / "rank_"))


def dump_flight_record() -> None:
    """Write this rank's record if it is enabled, within DUMP_S. Errors are suppressed, since the process is ending."""
    if prefix := os.environ.get(_PREFIX):
        with suppress(RuntimeError):  # no more threads
            thread = threading.Thread(target=_dump, args=(prefix,), daemon=True)
            thread.start()
            thread.join(DUMP_S)


def _dump(prefix: str) -> None:
    with suppress(Exception), open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(GIL_S, exit=True, file=nowhere)
        try:
            record = _record()
        finally:
            faulthandler.cancel_dump_traceback_later()
        path = Path(f"{prefix}{dist.get_rank()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(record))


def _record() -> dict[str, Any]:
    """In the format of torchfrtrace. Uses private functions of torch 2.11 to 2.13."""
    recorder = "nccl" if dist.get_backend() == "nccl" else "fr"
    dump = getattr(_distributed_c10d, f"_dump_{recorder}_trace")
    record = pickle.loads(dump(True, False, False))  # without stack traces: the first ones take 1.5 s
    if recorder == "fr":  # gloo does not record its groups
        record["pg_config"] = {
            name: {"name": name, "desc": group.group_desc, "ranks": str(dist.get_process_group_ranks(group))}
            for group, name in distributed_c10d._world.pg_names.items()
        }
    return record
