#!/usr/bin/env bash
# Runs a training script on the nodes of a SLURM job, once on each; there fairseq starts a process for
# each GPU. A job that is preempted is queued again and goes on from its last checkpoint.
#
#   sbatch --nodes 4 --gpus-per-node 8 --cpus-per-task 32 train_scripts/slurm.sh \
#       train_scripts/a_base.sh model.position_encoding=m4m \
#       task.data=data-bin/books-wiki-openwebtext
#
# Your cluster may want --partition, --account and --time too. Data and checkpoints must be on a file
# system that all nodes see.
#
#SBATCH --job-name=fairseq-posenc
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail
[ $# -ge 1 ] || {
    echo "slurm: error: expected a training script and its arguments" >&2
    exit 2
}
# fairseq finds the other nodes by Slurm's variables if it has a port. srun does not take the
# processors over from sbatch by itself.
exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "$@" \
    distributed_training.distributed_port=$((20000 + SLURM_JOB_ID % 10000)) \
    distributed_training.distributed_world_size=$((SLURM_JOB_NUM_NODES * SLURM_GPUS_ON_NODE))
