#!/usr/bin/env bash
# Training on one node: a rank for each task, started by mpirun.
# Submit it from the repository: sbatch slurm/one_node.sh [more flags of the training]

# --- edit: what to ask for --------------------------------------------------
#SBATCH --job-name=hvd-adaptive
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

# --- edit: where Horovod is installed, and what to run ----------------------
export PATH="$PWD/.venv/bin:$PATH"
training=(python examples/mnist.py --no-cuda --compression alq --bits 3 --epochs 4)
# ----------------------------------------------------------------------------

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# Slurm has given each rank its cores; Open MPI need not bind them again.
mpirun -np "$SLURM_NTASKS" --bind-to none "${training[@]}" "$@"
