"""Our all-to-all path against DeepSpeed's and diffusers', on gloo processes of this machine.

python -m benchmarks.ulysses --ranks 2 --tokens 1024 6400
python -m benchmarks.ulysses --quick

Attention of one layer, forward and backward, at equal geometry and with the same SDPA inside: the best of several
rounds' medians, the bytes that a rank hands to all-to-alls, and the bytes that it keeps for the backward pass. All
three must agree. `alone` is a process that keeps whole sequences.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.output import print_figures, say
from src.app.processes import free_port
from src.core.clock import monotonic_s
from src.parallel.ulysses import SequenceGroup

HEADS, WIDTH = 12, 32


def ours(sequence: SequenceGroup, tokens: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """One collective for q, k and v, one back."""
    return lambda q, k, v: sequence.attention(q, k, v, lengths=(tokens,))


def deepspeed_s(group: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Three collectives and one back; even lengths only."""
    from deepspeed.sequence.layer import DistributedAttention

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()

    attention = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: attention(q, k, v, 0)


def diffusers_s(group: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Its own collectives (`SeqAllToAllDim`), four of them."""
    from diffusers.models.attention_dispatch import SeqAllToAllDim

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (SeqAllToAllDim.apply(group, x.contiguous(), 2, 1).transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()
        return SeqAllToAllDim.apply(group, out, 1, 2)

    return attention


def measure(attention: Callable[[Tensor, Tensor, Tensor], Tensor], qkv: list[Tensor], repeats: int) -> float:
    """Median seconds of forward and backward, from a common start."""
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start_s = monotonic_s()
        attention(*qkv).sum().backward()
        seconds.append(monotonic_s() - start_s)
    return statistics.median(seconds)


class Exchanged(TorchDispatchMode):
    """Counts the bytes of what is handed to all-to-alls, whichever of torch's interfaces they come through."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("c10d::alltoall_base_"):
            self.bytes += args[1].nbytes  # after the output
        elif func.name().startswith("_c10d_functional::all_to_all_single"):
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def footprint(attention: Callable[[Tensor, Tensor, Tensor], Tensor], qkv: list[Tensor]) -> dict[str, int]:
    """Bytes that are exchanged, forward and backward, and kept between the two."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Exchanged() as exchanged:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = attention(*qkv)
        output.sum().backward()
    return {"exchanged_bytes": exchanged.bytes, "kept_bytes": sum(kept.values())}


def rank_main(rank: int, arguments: argparse.Namespace, port: int, results: Any) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks)
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    group = dist.group.WORLD
    for tokens in arguments.tokens:
        ways = {
            "ours": ours(SequenceGroup(group), tokens),
            "deepspeed": deepspeed_s(group),
            "diffusers": diffusers_s(group),
        }
        torch.manual_seed(rank)
        shape = (arguments.batch, tokens // arguments.ranks, HEADS, WIDTH)
        qkv = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        expected = None
        medians: dict[str, list[float]] = {name: [] for name in ways}
        whole = [torch.randn(arguments.batch, tokens, HEADS, WIDTH, requires_grad=True) for _ in range(3)]
        alone = footprint(ours(SequenceGroup(), tokens), whole)
        sizes = {name: footprint(way, qkv) for name, way in ways.items()}
        for _ in range(arguments.rounds):  # in turns, since the machine's speed drifts
            for name, way in ways.items():
                output = way(*qkv).detach()
                expected = output if expected is None else expected
                assert torch.allclose(output, expected, atol=1e-5), name
                medians[name].append(measure(way, qkv, arguments.repeats))
        if rank == 0:
            best = {name: min(values) for name, values in medians.items()}
            results.put(
                {
                    "tokens": tokens,
                    "ours_over_best_ratio": best["ours"] / min(best["deepspeed"], best["diffusers"]),
                    "kept_over_alone_ratio": sizes["ours"]["kept_bytes"] / alone["kept_bytes"],
                    "alone": alone,
                    **{name: {"seconds": best[name], **sizes[name]} for name in ways},
                }
            )
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 6400])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few tokens, once: a test")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.repeats, arguments.rounds = [64], 1, 1
    context = multiprocessing.get_context("spawn")
    results, port = context.SimpleQueue(), free_port()
    processes = [
        context.Process(target=rank_main, args=(rank, arguments, port, results)) for rank in range(arguments.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    rows = []
    while not results.empty():
        rows.append(results.get())
        say(str(rows[-1]))
    print_figures("ulysses", {"ranks": arguments.ranks, "batch": arguments.batch, "rows": rows})


if __name__ == "__main__":
    main()
