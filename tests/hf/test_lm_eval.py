"""lm-eval measures a saved model by its own probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fairseq_posenc.hf import set_positions
from tests.helpers.hf_models import MODELS, compute_logits, save_tokenizer

pytest.importorskip("lm_eval", reason="needs lm-eval")


def test_likelihoods_are_those_of_the_model(tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = set_positions(MODELS["llama"].build(), "t5+window(size=4)").eval()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, [f"w{index}" for index in range(9)])
    settings = {"trust_remote_code": True, "device": "cpu", "dtype": "float32"}
    evaluated = HFLM(pretrained=str(tmp_path), **settings)
    texts = [("w1 w2 w3 w4", " w5 w6"), ("w7", " w8 w0 w1")]
    requests = [Instance("loglikelihood", {}, text, index) for index, text in enumerate(texts)]
    results = evaluated.loglikelihood(requests, disable_tqdm=True)
    for (start, end), (likelihood, _) in zip(texts, results, strict=True):
        tokens = evaluated.tokenizer(start + end, return_tensors="pt").input_ids
        logits = compute_logits(model, {"input_ids": tokens}).log_softmax(-1)
        chosen = logits[:, :-1].gather(2, tokens[:, 1:, None])[0, -len(end.split()) :]
        torch.testing.assert_close(torch.tensor(likelihood), chosen.sum(), rtol=1e-5, atol=1e-5)
