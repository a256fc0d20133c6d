"""The process that compiles beside a rank: Inductor leaves what it makes on disk, where the rank finds it.

In: on standard input the lengths of requests, one a line; the requests, one after the other, in a file. Out: on
standard output a line of JSON for each. It runs at a low priority, ends with the rank, and never computes a step.
"""

import json
import os
import sys
import time
import traceback
from typing import Any

import torch

from plait.processes import end_group_with_parent
from plait.program.segment.graph_bytes import UnknownOpError, unpack_graph
from plait.program.segment.standalone import decompositions_for
from plait.torch_private.inductor import InductorError, compile_graph

_NICE = 5
"""By which ranks come first where there are fewer processors than processes."""


def settings() -> dict[str, Any]:
    """What compiled code depends on beside a graph and its tensors."""
    matmul = torch.backends.cuda.matmul
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "fp32": matmul.fp32_precision,
        "fp16": matmul.allow_fp16_reduced_precision_reduction,
        "bf16": matmul.allow_bf16_reduced_precision_reduction,
    }


def _set(given: dict[str, Any]) -> None:
    matmul = torch.backends.cuda.matmul
    torch.set_num_threads(given["threads"])
    torch.set_default_dtype(given["dtype"])
    strict, warns = given["deterministic"]
    torch.use_deterministic_algorithms(strict, warn_only=warns)
    matmul.fp32_precision = given["fp32"]
    matmul.allow_fp16_reduced_precision_reduction = given["fp16"]
    matmul.allow_bf16_reduced_precision_reduction = given["bf16"]


def serve(parent_pid: int, requests: int) -> None:
    """Answer requests until there are no more; `requests` is the file that they are in."""
    end_group_with_parent(parent_pid)
    os.nice(_NICE)
    answers = os.dup(1)
    os.dup2(2, 1)  # for whatever prints
    at = 0
    for line in sys.stdin:
        size = int(line)
        answer = _answer(os.pread(requests, size, at))
        at += size
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _answer(data: bytes) -> dict[str, Any]:
    """How long it took and why it cannot be; `unknown`: nobody knows, the rank has to try itself."""
    started = time.perf_counter()
    reason, unknown = None, False
    try:
        graph, others = unpack_graph(data)
        _set(others["settings"])
        inputs = others["inputs"]
        compile_graph(graph, inputs, decompositions_for(inputs), others["processes"])
    except InductorError as error:
        reason = str(error)
    except (UnknownOpError, ImportError, AttributeError) as error:
        reason, unknown = str(error), True
    except Exception:
        reason, unknown = traceback.format_exc().splitlines()[-1], True
    return {"seconds": time.perf_counter() - started, "reason": reason, "unknown": unknown}
