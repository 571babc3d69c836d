"""What commands share: programs with logs, a pool of workers, Slurm, options, one-line errors.

A command locks its folder, records its settings there (:mod:`fairseq_posenc.folders`), and starts
programs with logs (``programs.run_logged``), several at a time by ``run_here`` or ``run_on_slurm``.
"""
