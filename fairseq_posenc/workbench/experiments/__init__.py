"""Many small training runs: ``compare`` makes them; ``choose`` looks up what they have shown.

Read ``compare/command.py`` from top to bottom: it makes the data (``corpus``, ``data_bin``), trains
(``trainings``), judges (``compare/outcomes``) and reports (``compare/report``). ``length`` measures
the perplexity of causal language models by context length.
"""
