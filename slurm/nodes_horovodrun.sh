#!/usr/bin/env bash
# Training on several nodes, started by horovodrun over Gloo: no MPI is needed, but ssh between the
# nodes without a password.
# Submit it from the repository, on a file system that all nodes share:
#   sbatch slurm/nodes_horovodrun.sh [more flags of the training]

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
network=() # (--network-interfaces ib0)
# ----------------------------------------------------------------------------

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# "first:4,second:4", from Slurm's "node[1-2]".
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$SLURM_NTASKS_PER_NODE/" | paste -sd,)
horovodrun --gloo -np "$SLURM_NTASKS" -H "$hosts" "${network[@]}" "${training[@]}" "$@"
