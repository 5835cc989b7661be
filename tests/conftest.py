"""One thread and one instruction set, so that every run of the tests computes the same numbers; Triton interpreted."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():  # before anybody imports Triton, which reads it once
    os.environ.setdefault("TRITON_INTERPRET", "1")
