#!/usr/bin/env bash
# Training on several nodes, started by srun: Slurm makes the ranks itself, and they find each other
# through PMIx. "srun --mpi=list" tells whether this Slurm has it.
# Submit it from the repository, on a file system that all nodes share:
#   sbatch slurm/nodes_srun.sh [more flags of the training]

# --- edit: what to ask for --------------------------------------------------
#SBATCH --job-name=hvd-adaptive
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
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
# From Slurm 22.05 on srun no longer takes --cpus-per-task over from the job.
srun --mpi=pmix --cpus-per-task="$OMP_NUM_THREADS" --kill-on-bad-exit "${training[@]}" "$@"
