"""All-reduce in PyTorch, in a process for each GPU: `benchmarks.all_reduce` starts it.

The last line that the first process prints is the JSON result.
"""

import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

# Number of sums in a graph, and number of timed replays.
_COUNT, _RUNS = 200, 7


def main(argv: Sequence[str] | None = None) -> int:
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD.group_name

    def microseconds(run: Callable[[], object]) -> float:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_COUNT):
                run()
        times = []
        for _ in range(_RUNS + 2):
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return 1e6 * statistics.median(times[2:]) / _COUNT

    rows = []
    for shape in sys.argv[1:] if argv is None else argv:
        m, width = map(int, shape.split("x"))
        x = torch.zeros(m, width, dtype=torch.bfloat16, device=device)
        shared = symmetric.empty(m * width, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(shared, group)
        shared.zero_()
        one_shot = functools.partial(torch.ops.symm_mem.one_shot_all_reduce, shared, "sum", group)
        two_shot = functools.partial(torch.ops.symm_mem.two_shot_all_reduce_, shared, "sum", group)
        for name, run in (
            ("PyTorch, NCCL", functools.partial(dist.all_reduce, x)),
            ("PyTorch, symmetric memory", one_shot),
            ("PyTorch, symmetric memory, two shots", two_shot),
        ):
            row = {"m": m, "width": width, "implementation": name}
            try:
                rows.append(row | {"us": microseconds(run)})
            except RuntimeError as error:
                rows.append(row | {"problem": str(error).splitlines()[0]})
    if rank == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
