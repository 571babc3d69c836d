"""The commands of ``fairseq-posenc``: train, compare, fine-tune, translate, convert and report."""
