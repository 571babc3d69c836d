"""Splits lines into sentences by rules, for European languages and Chinese (``--sentences``).

A sentence ends at ``.``, ``!``, ``?`` or ``…`` and closing quotes or brackets, if white space
follows, and then a capital, a digit, or an opening quote or bracket. A ``.`` does not end it after
a known abbreviation, an initial, or a number that begins the sentence (``1. Foo``, ``(1. Foo``). At
``。``, ``！`` and ``？`` a sentence ends with or without white space. Only white space between
sentences is lost.
"""

from __future__ import annotations

from collections.abc import Iterator

import regex

# A capital or a number after these does not begin a sentence: "Mr. Brown", "No. 5".
_ABBREVIATION_LIST = """
mr mrs ms dr prof st messrs mme mlle mgr gen col lt capt cpt cmdr adm maj sgt cpl pvt rev hon gov
sen rep pres supt det insp no nos vol vols fig figs eq eqs sec ch p pp pg v vs c ca cf approx al ed
eds trans lit mt ft jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri
e.g i.e viz bros op dept univ assn bzw usw z.b d.h nr str bd hrsg dir env
"""
# Words that rarely follow an initial or "U.S." inside a sentence, so that they begin a new one.
_STARTER_LIST = """
the this that these those a an it its he she they we i you his her their our my in on at by for from
to with as after before during when while since although though however but and or if there here
then thus so some many most all both each no not one what who why how
"""
_ABBREVIATIONS = frozenset(_ABBREVIATION_LIST.split())
_STARTERS = frozenset(_STARTER_LIST.split())
_OPENERS = "\"'“‘„«([{¿¡"
_OPENING = f"[{regex.escape(_OPENERS)}]*"
_CLOSING = r"""["'”’»)\]}]*"""
# The first word of the next sentence, as in « Non ; \p{Lo} are letters without case, as in Arabic.
_NEXT = rf"(?P<next>{_OPENING}\s?[\p{{Lu}}\p{{Lo}}\p{{N}}]\p{{L}}*)"
_WESTERN = rf"(?P<western>[.!?…]+{_CLOSING})\s+(?={_NEXT})"
_CHINESE = r"(?P<chinese>[。！？]+[”’」』）》】〕]*)\s*(?=\S)"
_BOUNDARY = regex.compile(f"{_WESTERN}|{_CHINESE}")
_MAX_WORD = 40  # characters of a word that are read; all abbreviations are shorter
_INITIAL = regex.compile(r"\p{Lu}|\p{L}(\.\p{L})+")  # "J" or "U.S"


def split_sentences(line: str) -> Iterator[str]:
    """Yield the sentences of a line, without white space at their ends."""
    begin = 0
    for match in _BOUNDARY.finditer(line):
        end = max(match.end("chinese"), match.end("western"))  # -1: the group did not match
        if match["chinese"] or _ends_sentence(line, begin, match):
            yield line[begin:end].strip()
            begin = end
    if rest := line[begin:].strip():
        yield rest


def _ends_sentence(line: str, begin: int, match: regex.Match[str]) -> bool:
    """Check whether western punctuation ends the sentence that begins at ``begin``."""
    if match["western"] != ".":  # any other ends it, even after an abbreviation: 'Mr.!'
        return True
    # Reading the whole line each time would take quadratic time.
    before = line[max(begin, match.start() - _MAX_WORD) : match.start()].split()
    if not before:
        return True
    word = before[-1].lstrip(_OPENERS)
    follower = match["next"].lstrip(_OPENERS).strip().lower()
    if word.lower() in _ABBREVIATIONS:
        # "no" is also a word: "He said no. The others agreed."
        return word.lower() == "no" and follower in _STARTERS
    if _INITIAL.fullmatch(word):
        return follower in _STARTERS
    return not (word.isdigit() and line[begin : match.start()].strip().lstrip(_OPENERS) == word)
