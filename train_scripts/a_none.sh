#!/usr/bin/env bash
# Pre-trains RoBERTa-base without positions, or with positions that begin anew in each sentence, as
# a_small.sh does with others (Huang et al. 2021, arXiv:2109.12788, section 5.2). Both fail: the
# training loss ends near 5.8 (none) and near 4.3 (sentence_learned), in the place of 1.4. Those are
# natural logarithms, as far as one can tell; fairseq's are to the base of 2: 8.4, 6.2 and 2.0.
#
#   train_scripts/a_none.sh ENCODING DATA [OPTION...] [-- OPTION OF FAIRSEQ-TRAIN...]
#
#   train_scripts/a_none.sh none data-bin/books-wiki
#   train_scripts/a_none.sh sentence_learned data-bin/books-wiki
#
# The positions of sentence_learned need data with a sentence a line (preprocess: --sentences).

. "$(dirname "$0")/a_small.sh"
