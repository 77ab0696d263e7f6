#!/usr/bin/env bash
# Training on GPUs, a rank for each, gradients over NCCL: Horovod must have been built with
#   hvd-adaptive install-horovod --cuda yes
# Submit it from the repository, on a file system that all nodes share:
#   sbatch slurm/gpus.sh [more flags of the training]

# --- edit: what to ask for; tasks and GPUs of a node must be as many --------
#SBATCH --job-name=hvd-adaptive
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=4
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

# --- edit: where Horovod is installed, and what to run ----------------------
export PATH="$PWD/.venv/bin:$PATH"
training=(python examples/mnist.py --compression alq --bits 3 --epochs 4)
# Where nodes have several networks, name the one that NCCL begins on: export NCCL_SOCKET_IFNAME=ib0
# ----------------------------------------------------------------------------

if ! horovodrun --check-build | grep -qF '[X] NCCL'; then
  echo "this Horovod has no NCCL: build it with HOROVOD_GPU_OPERATIONS=NCCL" >&2
  exit 1
fi
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# Ranks choose the GPU of their number in the node themselves, so each must see all of them. MPI
# carries level tables and control messages alone: TCP will do.
mpirun -np "$SLURM_NTASKS" --bind-to none --mca pml ob1 --mca btl self,vader,tcp \
  -x PATH -x OMP_NUM_THREADS "${training[@]}" "$@"
