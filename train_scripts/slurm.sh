#!/usr/bin/env bash
# Runs a training script on the nodes of a SLURM job, once on each; there it starts torchrun with the
# node's GPUs. A job that is preempted is queued again and goes on from its last checkpoint.
#
#   sbatch --nodes 4 --gpus-per-node 8 --cpus-per-task 32 train_scripts/slurm.sh \
#       train_scripts/a_base.sh m4m data-bin/books-wiki-openwebtext --init roberta.base.m4m.pt
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
# srun does not take the processors over from sbatch by itself.
exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "$@"
