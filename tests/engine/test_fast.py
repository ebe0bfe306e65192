"""`minikv.fast` computes what the formulas of `minikv.model` say."""

import pytest
import torch

from minikv.fast import FastLinear, FastRMSNorm
from minikv.model import Linear, RMSNorm


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_norm(rows, scale):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 48) * scale, torch.rand(48) + 0.5
    found = FastRMSNorm(weight, 1e-6)(x)
    torch.testing.assert_close(found, RMSNorm(weight, 1e-6)(x), rtol=1e-5, atol=1e-6)


def test_the_norm_of_zero_is_zero():
    assert torch.equal(FastRMSNorm(torch.ones(4), 1e-6)(torch.zeros(2, 4)), torch.zeros(2, 4))


@pytest.mark.skipif(not FastLinear.pays(128), reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_matrix_product(rows, has_bias):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 48), torch.randn(40, 48)
    bias = torch.randn(40) if has_bias else None
    found = FastLinear(weight, bias)(x)
    torch.testing.assert_close(found, Linear(weight, bias)(x), rtol=1e-4, atol=1e-4)


def test_a_model_on_a_cpu_uses_both_and_any_other_dtype_the_formulas(checkpoint):
    import minikv

    narrow = checkpoint("llama")
    fast, plain = minikv.load("tinypy"), minikv.load(narrow.folder, dtype=torch.bfloat16)
    assert isinstance(fast.transformer.norm, FastRMSNorm)
    assert isinstance(fast.transformer.head, FastLinear) == FastLinear.pays(128)
    assert isinstance(narrow.lm.transformer.head, Linear)
    assert isinstance(plain.transformer.norm, RMSNorm)
    assert isinstance(plain.transformer.head, Linear)
