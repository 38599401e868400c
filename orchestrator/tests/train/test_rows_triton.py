"""The GPU kernels on rows of scores: interpreted against the plain versions, and compiled for the GPUs there are.

Both need Triton, which a machine without a GPU may lack.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from orchestrator.train import attention, indexer

B, S, H, W, BLOCK = 2, 8, 2, 4, 4
SCALE = 0.3
KERNELS = ("softmax", "gradient", "window softmax", "window gradient", "combine", "combine gradient", "divergence")

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed, so its kernels cannot be run"
)


class Cases:
    """Largest difference between kernel and plain version, by kernel. Needs TRITON_INTERPRET=1 from before the import.

    Two slices of queries, several blocks of columns with the last one not full, one row without any visible column.
    """

    def __init__(self) -> None:
        from orchestrator.train import rows_triton

        rows_triton._BLOCK = BLOCK
        self.kernels = rows_triton
        self.errors: dict[str, float] = {}
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def compare(self, name: str, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        for a, b in pairs:
            assert a.isfinite().all() and b.any(), name
            self.errors[name] = max(self.errors.get(name, 0.0), float((a - b).abs().max()))

    def run(self) -> dict[str, float]:
        for ratio in (1, 2):
            for selected in (False, True):
                self.attention(ratio, selected)
            self.indexer(ratio)
        self.window()
        return self.errors

    def attention(self, ratio: int, selected: bool) -> None:
        groups = S // ratio
        visible = ((torch.arange(S) + 1) // ratio).int()
        visible[1] = 0
        chosen = torch.rand(B, S, groups, generator=self.generator) < 0.4 if selected else None
        seen = attention.window_mask(B, S, W, None, torch.device("cpu"))
        window, sink, delta = self.draw(B, S, H, 2 * W), self.draw(H), self.draw(B, S, H)
        plain = [torch.zeros(B, S, H, 2 * W), torch.zeros(B, S, H), torch.zeros(B, S, groups)]
        ours = [t.clone() for t in plain]
        for first, count in ((0, S // 2), (S // 2, S // 2)):
            width = (first + count) // ratio
            main, dp = self.draw(B, count, H, width), self.draw(B, count, H, width)
            given = window, visible, chosen, seen, sink, SCALE
            a = self.kernels.softmax(main.clone(), *given, *ours, first, count)
            b = attention._softmax(main.clone(), *given, *plain, first, count)
            self.compare("softmax", (a, b))
            scores, back = main.clone(), dp.clone()
            total = plain[1]
            self.kernels.gradient(scores, back, total, delta, visible, chosen, SCALE, first, count)
            wanted = attention._gradient(main, dp, total, delta, visible, chosen, SCALE, first, count)
            self.compare("gradient", *zip((scores, back), wanted, strict=True))
        self.compare("softmax", *zip(ours, plain, strict=True))

    def window(self) -> None:
        seen = attention.window_mask(B, S, W, torch.full((B, S), 5).clamp(max=torch.arange(S)), torch.device("cpu"))
        scores, dp = self.draw(B, S, H, 2 * W), self.draw(B, S, H, 2 * W)
        sink, delta, visible = self.draw(H), self.draw(B, S, H), torch.zeros(S, dtype=torch.int32)
        plain = [torch.zeros(B, S, H, 2 * W), torch.zeros(B, S, H), torch.zeros(B, S, 0)]
        ours = [t.clone() for t in plain]
        attention._softmax(None, scores, visible, None, seen, sink, SCALE, *plain, 0, S)
        self.kernels.softmax(None, scores, visible, None, seen, sink, SCALE, *ours, 0, S)
        self.compare("window softmax", *zip(ours[:2], plain[:2], strict=True))
        wanted = attention._gradient(scores, dp, plain[1], delta, None, seen, SCALE, 0, S)
        self.kernels.gradient(scores, dp, plain[1], delta, None, seen, SCALE, 0, S)
        self.compare("window gradient", *zip((scores, dp), wanted, strict=True))

    def indexer(self, ratio: int) -> None:
        groups, heads = S // ratio, 8
        weights, upstream = self.draw(B, S, heads), self.draw(B, S, groups)
        plain, ours = torch.zeros(B, S, groups), torch.zeros(B, S, groups)
        dplain, dours = torch.zeros(B, S, heads), torch.zeros(B, S, heads)
        for first, count in ((0, S // 2), (S // 2, S // 2)):
            raw = self.draw(B, count, heads, (first + count) // ratio)
            indexer._combine(raw, weights, plain, first)
            self.kernels.combine(raw, weights, ours, first)
            wanted = indexer._gradient(raw, weights, upstream, dplain, first)
            self.kernels.combine_gradient(raw, weights, upstream, dours, first)
            self.compare("combine gradient", (raw, wanted))
        self.compare("combine", (ours, plain))
        self.compare("combine gradient", (dours, dplain))
        shared = indexer.visible_rows((torch.arange(S) + 1) // ratio - 1, groups)
        for allowed in (shared, shared & (torch.rand(B, S, groups, generator=self.generator) < 0.7)):
            scores, mass = (2 * self.draw(B, S, groups)).requires_grad_(), self.draw(B, S, groups).exp()
            mass[0, 7] = 0.0
            got = self.kernels.Divergence.apply(scores, allowed, mass)
            expected = indexer.index_loss(scores, allowed, mass)
            a, b = (torch.autograd.grad(3 * loss, scores)[0] for loss in (got, expected))
            self.compare("divergence", (got, expected), (a, b))


@pytest.fixture(scope="module")
def errors():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@needs_triton
@pytest.mark.parametrize("kernel", KERNELS)
def test_interpreted(errors, kernel):
    assert errors[kernel] < 1e-5


def signatures() -> list[tuple[Any, dict[str, str], dict[str, object]]]:
    """(kernel, types of its arguments, constants) of every kernel in every variant, at the sizes of v41-mini."""
    from orchestrator.train import rows_triton as rows
    from orchestrator.train import sinkhorn

    def types(**names: str) -> dict[str, str]:
        return {name: kind for kind, each in names.items() for name in each.split()}

    def typed(floats: str = "", halves: str = "", bools: str = "", ints: str = "", sizes: str = "", scalars: str = ""):
        lists = {"*fp32": floats, "*bf16": halves, "*i1": bools, "*i32": ints, "i32": sizes, "fp32": scalars}
        return types(**lists)

    sizes = "first count length width groups"
    found: list[tuple[Any, dict[str, str], dict[str, object]]] = []
    for chosen in (True, False):
        given = typed("sink total", "main window p pw mass", "chosen seen", "visible", sizes, "scale")
        found.append((rows._softmax, given, {"HEADS": 4, "NEAR": 256, "CHOSEN": chosen, "BLOCK": 512}))
    for visible, chosen in ((True, True), (True, False), (False, True)):
        given = typed("total delta", "scores dp", "chosen", "visible", sizes, "scale")
        found.append((rows._gradient, given, {"HEADS": 4, "VISIBLE": visible, "CHOSEN": chosen, "BLOCK": 512}))
    found.append((rows._combine, typed("weights scores", "raw", sizes=sizes), {"HEADS": 8, "BLOCK": 512}))
    given = typed("weights grad dweights", "raw", sizes=sizes)
    found.append((rows._combine_gradient, given, {"HEADS": 8, "BLOCK": 512}))
    for batched in (True, False):
        given = typed("scores kl logsum weight", "mass", "allowed", sizes="rows groups length")
        found.append((rows._divergence, given, {"BATCHED": batched, "BLOCK": 512}))
        given = typed("scores logsum weight grad out", "mass", "allowed", sizes="groups length", scalars="share")
        found.append((rows._divergence_gradient, given, {"BATCHED": batched, "BLOCK": 512}))
    for kernel, floats in ((sinkhorn._forward, "logits result sums"), (sinkhorn._backward, "result sums grad out")):
        found.append((kernel, typed(floats, sizes="rows iterations", scalars="eps"), {"N": 4, "BLOCK": 64}))
    return found


@needs_triton
def test_every_kernel_is_among_those_compiled():
    from triton.runtime import JITFunction

    from orchestrator.train import rows_triton, sinkhorn

    there = {v for module in (rows_triton, sinkhorn) for v in vars(module).values() if isinstance(v, JITFunction)}
    assert there == {kernel for kernel, _, _ in signatures()}


@needs_triton
@pytest.mark.parametrize("capability", [90, 100])
def test_compiled(capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, types, constants in signatures():
        names = kernel.arg_names
        source = ASTSource(
            kernel,
            {name: types.get(name, "constexpr") for name in names},
            {(names.index(name),): value for name, value in constants.items()},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert f".target sm_{capability}" in compiled.asm["ptx"] and compiled.asm["cubin"]
        assert compiled.metadata.shared <= 48 << 10


if __name__ == "__main__":
    print(json.dumps(Cases().run()))
