"""What commands share: programs with logs, a pool of workers, Slurm, options, one-line errors.

A command locks its folder and binds it to its request (:mod:`fairseq_posenc.folders`), prints one
line when it is stopped (``exit_codes.signals_as_keyboard_interrupt``), and starts programs of
fairseq with their logs (``programs.run_logged``), one by one or by a pool (``pool.run_here``, or
``slurm.run_on_slurm`` on a cluster).
"""
