"""What commands share: programs with logs, a pool of workers, Slurm, options, one-line errors.

Commands start programs with logs by ``programs.run_logged``, several by ``run_here`` or on Slurm.
"""
