"""Accelerate's `get_logger`: a logger that speaks once, on the main process, unless told otherwise."""

import logging
import os
from typing import Any

import torch.distributed as dist


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """Takes `main_process_only` and `in_order` beside what a logger takes."""

    def log(  # type: ignore[override]
        self,
        level: int,
        msg: object,
        *args: Any,
        main_process_only: bool = True,
        in_order: bool = False,
        **more: Any,
    ) -> None:
        """`in_order`: all ranks speak, one after the other; all must call it."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        more["stacklevel"] = more.get("stacklevel", 1) + 1
        if in_order:
            for turn in range(ranks):
                if turn == rank:
                    super().log(level, msg, *args, **more)
                if ranks > 1:
                    dist.barrier()
        elif rank == 0 or not main_process_only:
            super().log(level, msg, *args, **more)

    def warning_once(self, msg: object, *args: Any, **more: Any) -> None:
        """The same text is told once."""
        told = self.logger.__dict__.setdefault("told_once", set())
        if (text := str(msg)) not in told:
            told.add(text)
            self.warning(msg, *args, **more)


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """The logger of that name."""
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
    return RankLogger(logger, {})
