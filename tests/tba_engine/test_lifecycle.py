"""Lifecycle: who owns memory and for how long, on which thread and in which process."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.engine import activation, assert_plain, chain, chain_gradient, engine, save, stored_chain
from support.exactness import assert_bit_equal
from support.models import CubedTwice, Looks
from tba import ClosedError, Offloader, OffloadWarning, attach, offload_context

N = 4096


def test_a_graph_dropped_without_backward_gives_everything_back(scratch: Path, store_kind: str) -> None:
    with engine(scratch, store_kind=store_kind, prefetch_bytes=0) as offload:
        _, y = stored_chain(offload, N)
        assert offload.stats().live_records == 8
        blocks = offload.stats().file_bytes
        del y
        gc.collect()
        assert offload.stats().live_records == 0
        offload.flush()
        _, y = stored_chain(offload, N)
        assert offload.stats().file_bytes == blocks  # the space is used again
        del y


def test_a_saved_output_makes_no_cycle(scratch: Path) -> None:
    with engine(scratch) as offload:
        _, x = activation(N)
        with offload:
            y = x.exp()  # saves its own output
        gone = weakref.ref(y)
        gc.disable()
        try:
            del x, y
            assert gone() is None
            offload.flush()
            assert offload.stats().live_records == 0
        finally:
            gc.enable()


def test_memory_goes_when_the_write_is_done_and_nobody_else_holds_it(scratch: Path, store_kind: str) -> None:
    with engine(scratch, store_kind=store_kind) as offload:
        _, x = activation(N)
        with offload:
            y = x * 1
            storage = weakref.ref(y.untyped_storage())
            result = save(y)
            del y
        assert storage() is not None
        offload.flush()
        gc.collect()
        assert storage() is None
        result.sum().backward()


def test_exceptions_in_forward_and_backward_release_everything(scratch: Path, store_kind: str) -> None:
    def fail(*_: Tensor) -> None:
        raise KeyError("backward")

    with engine(scratch, store_kind=store_kind) as offload:
        _, x = activation(N)
        with pytest.raises(ZeroDivisionError), offload:  # noqa: PT012  # both belong to the failing forward
            y = chain(x)
            y = 1 / 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        with offload:
            z = chain(x)
            z = chain(Looks.apply(z, fail, z))
        offload.flush()
        with pytest.raises(KeyError):
            z.sum().backward()
        del y, z, x
        gc.collect()
        assert offload.stats().live_records == 0
        assert offload.stats().resident_bytes == 0


def test_an_unused_branch_and_an_evaluation_in_between_are_legal(scratch: Path, store_kind: str) -> None:
    with engine(scratch, store_kind=store_kind) as offload:
        leaf, x = activation(N)
        with offload:
            used, unused = save(x * 1), save(x * 2)
            with torch.no_grad():
                _ = save(x * 3)
        offload.flush()
        used.sum().backward()
        assert_bit_equal(leaf.grad, 2 * leaf.detach())
        assert offload.stats().live_records == 1
        del unused
        assert offload.stats().live_records == 0


def test_retain_graph_double_backward_and_saved_tensors_twice(scratch: Path, store_kind: str) -> None:
    with engine(scratch, store_kind=store_kind) as offload:
        leaf, x = activation(N)
        with offload:
            y = CubedTwice.apply(x)
        offload.flush()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
            assert_bit_equal(gradient, 3 * leaf.detach() * leaf.detach())
        with offload:
            (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
            offload.flush()
            (second,) = torch.autograd.grad(first.sum(), leaf)
        plain = leaf.detach().clone().requires_grad_()
        (expected,) = torch.autograd.grad((3 * plain * plain).sum(), plain)
        assert torch.allclose(second, expected)


def test_several_forwards_before_the_backwards_in_any_order(scratch: Path, store_kind: str) -> None:
    with engine(scratch, store_kind=store_kind, prefetch_bytes=3 * N * 4) as offload:
        leaves, results = [], []
        for seed in range(4):
            leaf, x = activation(N, seed=seed)
            with offload:
                results.append(chain(x, 4))
            leaves.append(leaf)
        offload.flush()
        for index in (2, 0, 3, 1):
            results[index].sum().backward()
        for leaf in leaves:
            assert_bit_equal(leaf.grad, chain_gradient(leaf, 4))


def test_nested_and_reentered_contexts(scratch: Path) -> None:
    with engine(scratch) as outer, engine(scratch) as inner:
        leaf, x = activation(N)
        with outer:
            a = save(x * 1)
            with inner, inner:
                b = save(a * 1)
            c = save(b * 1)
        with outer:
            d = save(c * 1)
        outer.flush()
        inner.flush()
        d.sum().backward()
        assert inner.stats().offloaded_bytes == x.nbytes
        assert outer.stats().offloaded_bytes == 3 * x.nbytes
        assert_bit_equal(leaf.grad, chain_gradient(leaf, 4))


def test_close_is_idempotent_and_late_users_get_a_clear_error(scratch: Path, store_kind: str) -> None:
    with engine(scratch, store_kind=store_kind) as offload:
        _, x = activation(N)
        with offload:
            stored = save(x)
        offload.flush()
        with offload:
            in_memory = save(x * 1)
        offload.close()
        offload.close()
        with pytest.raises(ClosedError, match="closed"), offload:
            pass
        with pytest.raises(ClosedError, match=r"float32\[4096\] #0.*closed"):
            stored.sum().backward()
        in_memory.sum().backward()
        assert not [t for t in threading.enumerate() if t.name.startswith("tba-")]


def test_one_offloader_per_model_and_settings_until_closed_or_dead(scratch: Path) -> None:
    model = nn.Linear(4, 4)
    one = offload_context(model, tier="nvme", storage_paths=scratch)
    assert offload_context(model, tier="nvme", storage_paths=scratch) is one
    assert offload_context(model, tier="keep") is not one
    assert offload_context(tier="keep") is not offload_context(tier="keep")
    one.close()
    two = offload_context(model, tier="nvme", storage_paths=scratch)
    assert two is not one
    gone = weakref.ref(two)
    del one, two, model
    gc.collect()
    assert gone() is None


def test_an_attached_model_is_followed_and_its_copies_are_not(scratch: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    offload = attach(model, tier="nvme", min_tensor_bytes=0, storage_paths=scratch)
    try:
        x = torch.randn(4, 16)
        model(x * 1).sum().backward()
        before = offload.stats().saved_bytes
        assert before > 0
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(x * 1).sum().backward()
            assert offload.stats().saved_bytes == before
            assert_bit_equal(other[0].weight.grad, model[0].weight.grad)
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(4, 3))
        before = offload.stats().saved_bytes
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        model.eval()
        with torch.no_grad():
            model(x)
    finally:
        offload.close()
    model(x * 1).sum().backward()
    assert offload.stats().saved_bytes == before


def test_suspend_lifts_the_hooks_for_a_region(scratch: Path) -> None:
    with engine(scratch) as offload:
        leaf, x = activation(N)
        with offload:
            y = save(x)
            with offload.suspend():
                assert torch.equal(torch.func.grad(lambda t: (t * t).sum())(torch.ones(3)), 2 * torch.ones(3))
                z = save(y * 1)
            result = save(z * 1)
        offload.flush()
        result.sum().backward()
        assert offload.stats().offloaded_bytes == 2 * x.nbytes
        assert_bit_equal(leaf.grad, chain_gradient(leaf, 3))


def test_another_thread_has_no_hooks_and_may_run_its_own_context(scratch: Path, store_kind: str) -> None:
    failures: list[BaseException] = []

    with engine(scratch, store_kind=store_kind, threads=2) as offload:

        def work(seed: int) -> None:
            try:
                for _ in range(10):
                    leaf, x = activation(N, seed=seed)
                    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
                    with offload:
                        y = chain(x, 5)
                    assert_plain(leaf, y, 5)
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        with offload:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        assert not failures, failures
        stats = offload.stats()
        assert stats.saved_bytes == stats.offloaded_bytes == 4 * 10 * 5 * N * 4


def test_concurrent_backwards_of_one_graph(scratch: Path, store_kind: str) -> None:
    with engine(scratch, store_kind=store_kind, threads=2, prefetch_bytes=4 * N * 4) as offload:
        leaf, x = activation(N)
        with offload:
            y = chain(x, 12).sum()
        offload.flush()
        expected = chain_gradient(leaf, 12)
        results: list[Tensor] = []
        threads = [
            threading.Thread(target=lambda: results.append(torch.autograd.grad(y, leaf, retain_graph=True)[0]))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4
        for gradient in results:
            assert_bit_equal(gradient, expected)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_in_mid_write_leaves_a_dead_engine_in_the_child(scratch: Path, store_kind: str) -> None:
    with engine(scratch, store_kind=store_kind, prefetch_bytes=0, threads=2) as offload:
        leaf, x = activation(1 << 18)
        with offload:
            y = chain(x, 6)
        while not offload.stats().written_bytes:  # at least one tensor is in the file alone, and others on their way
            time.sleep(0.001)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _, passes = activation(N)
                with offload:
                    z = save(passes)
                # A backward would be torch's to refuse: where there is a card, none runs in a forked child.
                assert_bit_equal(z.grad_fn.saved_tensors[0], passes)
                node = y.grad_fn
                try:
                    while node is not None:
                        getattr(node, "saved_tensors", None)
                        node = node.next_functions[0][0]
                except ClosedError:
                    status = 0
                del y, node
                gc.collect()
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert_plain(leaf, y, 6)


def test_a_tier_that_moved_nothing_says_why_once(scratch: Path) -> None:
    model = nn.Linear(8, 8)
    offload = offload_context(model, tier="nvme", storage_paths=scratch)
    with pytest.warns(OffloadWarning, match=r"moved nothing.*below min_tensor_bytes"), offload:
        model(torch.randn(2, 8, requires_grad=True) * 1).sum().backward()
    with offload:
        model(torch.randn(2, 8)).sum().backward()
    with pytest.warns(OffloadWarning, match="no_grad"), Offloader(config=offload.config), torch.no_grad():
        model(torch.randn(2, 8))
    offload.close()


def test_tier_cpu_on_cpu_tensors_keeps_them_and_says_so(scratch: Path) -> None:
    offload = offload_context(tier="cpu", min_tensor_bytes=0)
    _, x = activation(N)
    with pytest.warns(OffloadWarning, match="already in host memory"), offload:
        save(x).sum().backward()
    assert offload.stats().kept_bytes == x.nbytes
    offload.close()
