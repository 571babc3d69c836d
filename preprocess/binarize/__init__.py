"""Makes data-bins of running text; the other programs use its parts, too.

``command`` makes a data-bin of ``options``; ``shards`` lists the parts of the files, ``sources``
reads them, ``formats`` and ``sentences`` find the lines, ``items`` encodes them in the processes of
``pool``, and ``split`` writes them. ``vocabulary`` has the files of the tokens.
"""
