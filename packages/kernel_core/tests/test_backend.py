"""Backend choice: scoped, nested, and explicit about what it refuses."""

import pytest
import torch

import kernel_core
from kernel_core import check


def test_using_is_scoped_and_nests():
    assert not kernel_core.use_reference()
    with kernel_core.using("reference"):
        assert kernel_core.use_reference()
        with kernel_core.using("native"):
            assert not kernel_core.use_reference()
        assert kernel_core.use_reference()
    assert not kernel_core.use_reference()


def test_using_refuses_unknown_backends():
    with pytest.raises(ValueError, match="'cuda'"), kernel_core.using("cuda"):
        pass


def test_limit_isa_nests_and_restores():
    best = kernel_core._native.isa()
    with kernel_core.limit_isa("scalar"):
        assert kernel_core._native.isa() == "scalar"
        with kernel_core.limit_isa("best"):
            assert kernel_core._native.isa() == kernel_core._native.best_isa()
        assert kernel_core._native.isa() == "scalar"
    assert kernel_core._native.isa() == best


def test_limit_isa_refuses_what_the_cpu_lacks():
    with pytest.raises(ValueError, match="sse9"), kernel_core.limit_isa("sse9"):
        pass
    assert kernel_core._native.isa() == kernel_core._native.best_isa()


def test_available_isas_start_at_scalar_and_end_at_best():
    isas = kernel_core.available_isas()
    assert isas[0] == "scalar" and isas[-1] == kernel_core._native.best_isa()


def test_unsupported_names_op_device_and_what_exists():
    error = kernel_core.unsupported("mla_fp4.attention", torch.empty(1, device="meta"), "cpu")
    assert isinstance(error, NotImplementedError)
    assert all(word in str(error) for word in ("mla_fp4.attention", "meta", "cpu"))


def test_register_op_publishes_with_a_fake():
    kernel_core.register_op(
        "kernel_core_test", "double(Tensor x) -> Tensor", lambda x: x * 2, lambda x: torch.empty_like(x)
    )
    assert torch.equal(torch.ops.kernel_core_test.double(torch.ones(3)), torch.full((3,), 2.0))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert torch.ops.kernel_core_test.double(torch.empty(4)).shape == (4,)


def test_checks_name_argument_got_and_allowed():
    x = torch.zeros(2, 3)
    check.tensor("x", x, dtype=torch.float32, shape=(None, 3))
    with pytest.raises(ValueError, match=r"x: got dtype torch.float32, allowed is torch.int32 or torch.int64"):
        check.tensor("x", x, dtype=(torch.int32, torch.int64))
    with pytest.raises(ValueError, match=r"x: got shape \[2, 3\], allowed is \[\*, 4\]"):
        check.tensor("x", x, dtype=torch.float32, shape=(None, 4))
    with pytest.raises(ValueError, match=r"x: got shape \[2, 3\], allowed is \[6\]"):
        check.tensor("x", x, dtype=torch.float32, shape=(6,))
    with pytest.raises(ValueError, match=r"x: got strides \(1, 3\), allowed is a contiguous"):
        check.tensor("x", x.t(), dtype=torch.float32)
    with pytest.raises(ValueError, match="k: got 0, allowed is 1 to 8"):
        check.require(False, "k", 0, "1 to 8")
