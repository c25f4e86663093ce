#!/usr/bin/env bash
# The checks of docs/gpu.md on one CUDA device; needs PyTorch with CUDA and rlayout's dependencies.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH=. "${PYTHON:-python3}" benchmarks/gpu_check.py --device cuda "$@"
