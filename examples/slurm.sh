#!/bin/bash
#SBATCH --job-name=qwen3
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# A server on two nodes, in a container by enroot and pyxis. Entries are restored once a node, into its local disk.
set -euo pipefail

image=${IMAGE:-registry.example#vllm-kcache:1}
store=${STORE:-/lustre/kernels}       # a directory that all nodes can read; `hf://owner/kernels` likewise
local=/var/tmp/kcache-$SLURM_JOB_USER # not on a network file system: locks and renames are the node's own there

srun --ntasks-per-node=1 mkdir -p "$local"

# pyxis: the container gets the store for reading, and the local directory for writing.
srun --container-image="$image" \
  --container-mounts="$store:$store:ro,$local:/kcache" \
  --export=ALL,KCACHE_DIR=/kcache,KCACHE_WARMUP=sampling \
  kcache restore --from "$store" --fallback warmup --deadline 20m -- \
  vllm serve Qwen/Qwen3-30B-A3B --tensor-parallel-size 8

# What was compiled on any node after all, for the farm: kcache build --modules "$(cat missing-*.txt | paste -sd, -)"
# shellcheck disable=SC2016
srun --ntasks-per-node=1 --container-image="$image" --container-mounts="$local:/kcache,$PWD:/out" --export=ALL,KCACHE_DIR=/kcache \
  bash -c 'kcache report --missing > "/out/missing-$SLURMD_NODENAME.txt"' || true
