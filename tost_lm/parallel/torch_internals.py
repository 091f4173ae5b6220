"""All uses of private names of torch: the store of the process group, errors of its backends, and its flight record.

Tested with torch 2.11 to 2.13.
"""

import faulthandler
import os
import pickle
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from tost_lm.parallel import timeouts

GLOO_ERRORS = ("gloo/transport/", "Application timeout caused pair closure")  # NCCL and the store raise DistError
RECORDS = 2000
_PREFIX = "TORCH_FR_DUMP_TEMP_FILE"  # torch's variable: NCCL writes here too if it ends a process first


def new_store_connection() -> Store:
    """Another connection to the store of the default process group."""
    return distributed_c10d._get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]


def enable_flight_recorder(folder: Path) -> None:
    """Record collectives, and dump them to FOLDER/rank_N. Call it before the process group is created."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDS))
    os.environ.setdefault(_PREFIX, str(folder.absolute() / "rank_"))


def is_communication_error(error: BaseException | None) -> bool:
    """Whether this error, or one in its chain, comes from the process group."""
    if not isinstance(error, Exception):
        return False
    if isinstance(error, dist.DistError) or any(text in str(error) for text in GLOO_ERRORS):
        return True
    return is_communication_error(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


def dump_flight_record() -> None:
    """Write this rank's record if it is enabled, within DUMP_S. Errors are suppressed, since the process is ending."""
    thread = threading.Thread(target=_dump, daemon=True)
    with suppress(RuntimeError):  # no more threads
        thread.start()
        thread.join(timeouts.DUMP_S)


def _dump() -> None:
    with suppress(Exception), open(os.devnull, "w") as nowhere:
        path = Path(f"{os.environ[_PREFIX]}{dist.get_rank()}")
        # A hung GPU may block it while it holds the GIL, so that no Python code can end the process.
        faulthandler.dump_traceback_later(timeouts.GIL_S, exit=True, file=nowhere)
        try:
            record = _flight_record()
        finally:
            faulthandler.cancel_dump_traceback_later()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(record))


def _flight_record() -> dict[str, Any]:
    """In the format of torchfrtrace."""
    recorder = "nccl" if dist.get_backend() == "nccl" else "fr"
    dump = getattr(_distributed_c10d, f"_dump_{recorder}_trace")
    record = pickle.loads(dump(True, False, False))  # without stack traces: the first ones take 1.5 s
    if recorder == "fr":  # gloo does not record its groups
        record["pg_config"] = {
            name: {"name": name, "desc": group.group_desc, "ranks": str(dist.get_process_group_ranks(group))}
            for group, name in distributed_c10d._world.pg_names.items()
        }
    return record
