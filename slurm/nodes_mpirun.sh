#!/usr/bin/env bash
# Training on several nodes, started by mpirun: Open MPI asks Slurm for the hosts, no list of them
# is needed, nor ssh.
# Submit it from the repository, on a file system that all nodes share:
#   sbatch slurm/nodes_mpirun.sh [more flags of the training]

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
# Where nodes have several networks, name the one to use; else leave it empty.
network=() # (--mca btl_tcp_if_include ib0 --mca oob_tcp_if_include ib0)
# ----------------------------------------------------------------------------

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# -x: to ranks on other nodes, too.
mpirun -np "$SLURM_NTASKS" --bind-to none "${network[@]}" \
  -x PATH -x OMP_NUM_THREADS "${training[@]}" "$@"
