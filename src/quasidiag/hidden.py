"""Keeps ``torch.compile`` out of what it cannot trace: hooks that look into autograd's graph, and bookkeeping by layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame

P = ParamSpec("P")
T = TypeVar("T")


def hidden(function: Callable[P, T]) -> Callable[P, T]:
    """``torch._disable_dynamo``, but free where nothing is compiled: a small network's step calls dozens of hooks."""
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        known = function if eval_frame.get_eval_frame_callback() is None else disabled
        return known(*args, **kwargs)

    return call if _skipped(call) else disabled


def _skipped(function: Callable[..., object]) -> bool:
    """Have the compiler skip a function, but not what it calls; ``False`` if this version of torch cannot."""
    try:
        if hasattr(eval_frame, "skip_code"):  # before torch 2.8
            eval_frame.skip_code(function.__code__)
        else:
            action = eval_frame._FrameAction
            skip = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
            eval_frame.set_code_exec_strategy(function.__code__, skip)
        eval_frame.get_eval_frame_callback()
    except (AttributeError, TypeError):
        return False
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return True
