#!/usr/bin/env bash
# Elastic training that outlives its job: ranks come and go with their nodes, and before the time is
# up, or the job is preempted, training saves itself and is queued again.
# Submit it from the repository, on a file system that all nodes share, with ssh between the nodes:
#   sbatch slurm/elastic.sh [more flags of the training]

# --- edit: what to ask for; USR1 comes so many seconds before the end -------
#SBATCH --job-name=hvd-adaptive
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

# --- edit: where Horovod is installed, and what to run ----------------------
export PATH="$PWD/.venv/bin:$PATH"
checkpoint="$PWD/elastic-$SLURM_JOB_ID.pt" # found again when the job starts again
training=(python examples/elastic.py --no-cuda --compression alq --bits 3 --epochs 4)
least=1    # ranks without which training waits
network=() # (--network-interfaces ib0)
# ----------------------------------------------------------------------------

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
stop="$checkpoint.stop"
rm -f "$stop"

# USR1: the time is nearly up. TERM: preempted, or cancelled (then nothing queues it again).
trap 'touch "$stop"' USR1 TERM

# Which nodes are there is asked again and again, and a node that is down is left out.
discover="$checkpoint.hosts.sh"
cat > "$discover" << EOF
#!/bin/sh
sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --states=allocated,mixed,idle,completing \
  --responding --format="%N:$SLURM_NTASKS_PER_NODE" | sort -u
EOF
chmod +x "$discover"

horovodrun --gloo -np "$SLURM_NTASKS" --min-np "$least" --max-np "$SLURM_NTASKS" \
  --host-discovery-script "$discover" "${network[@]}" \
  "${training[@]}" --checkpoint "$checkpoint" --stop-file "$stop" "$@" &
# A signal ends wait, not horovodrun: wait again.
status=0
while kill -0 "$!" 2> /dev/null; do
  wait "$!" && status=0 || status=$?
done
rm -f "$discover"
if [ -e "$stop" ] && [ "$status" -eq 0 ]; then
  echo "saved in $checkpoint; queued again"
  rm -f "$stop"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
