# One rank of NCCL's broadcast or all-gather, for `flashboot bench --vs nccl`: RANK WORLD PORT KIND REPEATS SIZE...
# Prints one JSON object a line. Cold is what a new process pays: the communicator and the first collective.
import json, sys, time
import torch
import torch.distributed as dist

rank, world, port, kind, repeats = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
sizes = [int(size) for size in sys.argv[6:]]
torch.cuda.set_device(0)
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
began = time.monotonic()
dist.init_process_group(
    "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, device_id=torch.device("cuda:0")
)


def work(whole, own):
    if kind == "broadcast":
        dist.broadcast(whole, 0)
    else:
        dist.all_gather_into_tensor(whole, own)


first = True
for size in sizes:
    whole = torch.full((size,), 1 if rank == 0 or kind != "broadcast" else 0, dtype=torch.uint8, device="cuda")
    own = whole[: size // world].clone()
    work(whole, own)
    torch.cuda.synchronize()
    cold = time.monotonic() - began if first else None
    first = False
    for _ in range(3):
        work(whole, own)
    events, walls = [], []
    for _ in range(repeats):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        wall = time.monotonic()
        work(whole, own)
        end.record()
        torch.cuda.synchronize()
        walls.append((time.monotonic() - wall) * 1e3)
        events.append(start.elapsed_time(end))
    # Back to back, as a benchmark of collectives reports it.
    count = 20 if size <= 1 << 28 else 5
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        work(whole, own)
    end.record()
    torch.cuda.synchronize()
    print(
        json.dumps(
            {
                "bytes": size,
                "cold_ms": None if cold is None else cold * 1e3,
                "event_ms": sorted(events)[len(events) // 2],
                "wall_ms": sorted(walls)[len(walls) // 2],
                "queued_ms": start.elapsed_time(end) / count,
                "version": ".".join(map(str, torch.cuda.nccl.version())),
            }
        ),
        flush=True,
    )
    del whole, own
dist.destroy_process_group()
