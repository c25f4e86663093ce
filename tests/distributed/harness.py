"""Run a function on several gloo ranks, each a forked process, within a time limit."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank of a default process group and return what each returned.

    The function may be a closure; what it returns is pickled (tensors through numpy or plain lists are
    safest, tensors work). Ranks talk over 127.0.0.1 and are gone when this returns.

    Raises:
        AssertionError: a rank raised (with its traceback), died, or was not done after ``timeout`` seconds.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'store'}"
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(theirs, meeting, rank, world_size, function, args), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank_main(
    pipe: Connection, meeting: str, rank: int, world_size: int, function: Callable[..., Any], args: tuple
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
        result = function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(_pickle((False, traceback.format_exc())))
        raise
    pipe.send_bytes(_pickle((True, result)))


def _pickle(message: tuple[bool, Any]) -> bytes:
    # Plain pickle copies tensors; multiprocessing's own pickler would share memory that dies with the rank.
    return pickle.dumps(message)


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [p for rank, p in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        missing = [rank for rank in range(len(pipes)) if rank not in results]
        assert ready, f"ranks {missing} did not finish in time"
        for rank in missing:
            if pipes[rank] in ready:
                try:
                    done, result = pickle.loads(pipes[rank].recv_bytes())
                except EOFError:
                    raise AssertionError(f"rank {rank} died without a word") from None
                assert done, f"rank {rank} failed:\n{result}"
                results[rank] = result
    return [results[rank] for rank in range(len(pipes))]
