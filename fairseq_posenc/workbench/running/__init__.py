"""What commands share: programs with logs, a pool of workers, Slurm, options, one-line errors.

A command locks its folder and binds it to its request (:mod:`fairseq_posenc.folders`), prints one
line when it is stopped, and starts programs of fairseq with their logs (``programs.run_logged``),
one by one or some at a time (``programs.run_here``; ``slurm.run_on_slurm`` takes the same tasks).
"""
