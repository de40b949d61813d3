#!/bin/bash
# Two nodes of SLURM, one torchrun on each: sbatch examples/slurm.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00

# A local disk of each node, not a shared file system: every node writes its own scratch files.
export TBA_STORAGE_PATHS="${SLURM_TMPDIR:-/local/scratch}/tba"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun bash -c 'mkdir -p "$TBA_STORAGE_PATHS"'
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
    examples/fsdp2_torchrun.py
