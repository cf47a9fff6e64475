//! A stand-in for `libcuda.so.1` on host memory: **a test tool**, never installed with flashboot.
//!
//! It lets the CUDA arena and the transports above it run where there is no GPU. It answers as the real driver did
//! in the committed transcript (`transcript-h200.txt`; comments here name its rows), and where it differs it is
//! stricter: work completes late, streams overtake each other, taking memory away under pending work aborts, a
//! current context is always needed, ranges lie in one mapping, and a device pointer cannot be followed from the
//! host. A driver function that flashboot does not use aborts with its name.
//!
//! What a card writes by a dma-buf the devices see behind the flush and not before, where a stand-in for the card takes part
//! (`nic`).
//!
//! Fabric handles and the IMEX domain are built from documentation; **no hardware ever ran what they stand in
//! for**. The same goes for devices that die and for hosts without peer access.
//!
//! Nothing here moves bytes at a GPU's speed; no figure measured on it says anything.
//!
//! # Environment
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `FLASHBOOT_CUDA_SIM_DIR` | state shared by the processes of one simulated host; `imex/` in it (or a link) is the IMEX domain, its absence the missing channel | one a user, in the temporary directory |
//! | `…_DEVICES` | devices of the host | 2 |
//! | `…_MEM` | memory of each (`4GiB`, `256MiB`, bytes), over all processes | 4 GiB |
//! | `…_P2P` | `none`: no device reaches another's memory | they do |
//! | `…_SEED` | when work completes, and which stream overtakes which | 0 |
//! | `…_LATE_US` | longest delay before a piece of work, microseconds | 500 |
//! | `…_DRIVER_VERSION` | `cuDriverGetVersion` | 13000 |
//! | `…_NO_KERNEL` | set: no module loads | |
//! | `…_NO_READ_ONLY_REGISTER` | set: memory that the program may only read is not registered | it is |
//! | `…_MIG` | set: devices are MIG instances | |
//! | `…_FAULTS` | faults, separated by commas: `cuMemCreate:2:OUT_OF_MEMORY` (the second call; `*` for every one), `poison:after=100[:CODE]`, `die:device=0:after=100`; `once:` before one: in the first process that it can strike only | |
//! | `CUDA_VISIBLE_DEVICES` | as the driver reads it: ordinals and UUIDs | all |

mod abi;
mod config;
mod context;
mod device;
mod entry;
mod host;
mod kernel;
mod loud;
mod nic;
mod pinned;
mod ptx;
mod stream;
mod stubs;
mod vmm;
mod work;
mod world;
