"""Makes data-bins of running text; the other programs use its parts, too.

``command`` makes a data-bin of ``options``: ``sources`` lists the files, and reads them in chunks,
``formats`` and ``sentences`` find the lines, and ``items`` encodes them in the processes of
``pool``. ``vocabulary`` loads the files of the tokens, and ``output`` makes complete folders.
"""
