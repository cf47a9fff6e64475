//! Which NUMA node's memory lies near a GPU, and having a thread's new pages come from there.
//!
//! A preference, never a binding: where the node has no page left the kernel takes one from another, and a buffer that lies far
//! is slower, no worse.

use std::{fs, marker::PhantomData, path::Path, sync::OnceLock};

const MPOL_DEFAULT: libc::c_int = 0;
const MPOL_PREFERRED: libc::c_int = 1;
/// The kernel's largest node number (`MAX_NUMNODES` is 1024 at most).
const MAX_NODE: u32 = 1023;
const BITS: u32 = u64::BITS;
const WORDS: usize = ((MAX_NODE + 1) / BITS) as usize;

/// A NUMA node, as the kernel describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub number: u32,
    /// Whether it has memory.
    pub memory: bool,
    /// Whether it has processors. A GPU's own memory can be a node, which has none: nothing of the host's belongs there.
    pub processors: bool,
    /// How far every node is, this one among them: number and distance.
    pub distances: Vec<(u32, u32)>,
}

impl Node {
    fn is_hosts(&self) -> bool {
        self.memory && self.processors
    }
}

/// The node whose memory buffers for a GPU should come from, given the node that its slot belongs to. `None` where there is
/// nothing to choose, or nobody knows where the GPU is.
pub fn near(gpu: Option<u32>, nodes: &[Node]) -> Option<u32> {
    let hosts: Vec<_> = nodes.iter().filter(|node| node.is_hosts()).map(|node| node.number).collect();
    let gpu = gpu.filter(|_| hosts.len() > 1)?;
    if hosts.contains(&gpu) {
        return Some(gpu);
    }
    let from = nodes.iter().find(|node| node.number == gpu)?;
    let reachable = from.distances.iter().filter(|(number, _)| hosts.contains(number));
    reachable.min_by_key(|(number, distance)| (*distance, *number)).map(|(number, _)| *number)
}

/// This machine's nodes, read once; none where the kernel has no NUMA.
pub fn nodes() -> &'static [Node] {
    static NODES: OnceLock<Vec<Node>> = OnceLock::new();
    NODES.get_or_init(|| read(Path::new("/sys/devices/system/node")))
}

fn read(dir: &Path) -> Vec<Node> {
    let text = |path: &str| fs::read_to_string(dir.join(path)).unwrap_or_default();
    let (online, memory, processors) =
        (list(&text("online")), list(&text("has_memory")), list(&text("has_cpu")));
    let node = |number: &u32| {
        let distances = text(&format!("node{number}/distance"));
        let distances = distances.split_whitespace().map_while(|distance| distance.parse().ok());
        Node {
            number: *number,
            memory: memory.contains(number),
            processors: processors.contains(number),
            distances: online.iter().copied().zip(distances).collect(),
        }
    };
    online.iter().map(node).collect()
}

/// `0-1,4` as numbers; nothing of what cannot be read.
fn list(text: &str) -> Vec<u32> {
    let one = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        (last <= MAX_NODE).then_some(first..=last)
    };
    text.trim().split(',').filter_map(one).flatten().collect()
}

/// A thread's preference, until it is dropped on that thread.
#[derive(Debug)]
#[must_use = "dropped, the preference ends"]
pub struct Preference(PhantomData<*const ()>);

/// Has pages that this thread takes for the first time come from `node` where it has some, also those that a driver takes for
/// it. `None` where the kernel does not let us, or a policy was chosen for this thread already (`numactl`): that is left alone.
pub fn prefer(node: u32) -> Option<Preference> {
    if node > MAX_NODE || policy() != Some(MPOL_DEFAULT) {
        return None;
    }
    let mut mask = [0_u64; WORDS];
    *mask.get_mut((node / BITS) as usize)? |= 1 << (node % BITS);
    set(MPOL_PREFERRED, Some(&mask)).then_some(Preference(PhantomData))
}

/// [`prefer`]s the node [`near`] a GPU whose slot belongs to node `gpu`.
pub fn prefer_near(gpu: Option<u32>) -> Option<Preference> {
    prefer(near(gpu, nodes())?)
}

impl Drop for Preference {
    fn drop(&mut self) {
        if !set(MPOL_DEFAULT, None) {
            tracing::warn!("a thread's NUMA preference could not be taken back");
        }
    }
}

/// This thread's policy.
fn policy() -> Option<libc::c_int> {
    let mut mode: libc::c_int = -1;
    // SAFETY: without a mask and an address only the mode is written, to a local.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            std::ptr::null_mut::<u64>(),
            0_u64,
            0_u64,
            0_u64,
        )
    };
    (rc == 0).then_some(mode)
}

fn set(mode: libc::c_int, mask: Option<&[u64; WORDS]>) -> bool {
    let (at, bits) = mask.map_or((std::ptr::null(), 0), |mask| (mask.as_ptr(), u64::from(MAX_NODE) + 2));
    // SAFETY: the mask has as many bits as told (the kernel reads one bit fewer), and is only read; no memory is written.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, at, bits) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine whose nodes are `(memory, processors)`, `far` from one another and 10 from themselves.
    fn machine(nodes: &[(bool, bool)], far: impl Fn(u32, u32) -> u32) -> Vec<Node> {
        let numbers = 0..nodes.len() as u32;
        let node = |(number, (memory, processors)): (u32, &(bool, bool))| Node {
            number,
            memory: *memory,
            processors: *processors,
            distances: numbers
                .clone()
                .map(|other| (other, if other == number { 10 } else { far(number, other) }))
                .collect(),
        };
        numbers.clone().zip(nodes).map(node).collect()
    }

    #[test]
    fn buffers_lie_where_the_gpu_is_where_there_is_a_choice() {
        let one = machine(&[(true, true)], |_, _| 20);
        assert_eq!((near(Some(0), &one), near(None, &one), near(Some(0), &[])), (None, None, None));
        let two = machine(&[(true, true), (true, true)], |_, _| 21);
        assert_eq!((near(Some(0), &two), near(Some(1), &two)), (Some(0), Some(1)));
        assert_eq!((near(None, &two), near(Some(7), &two)), (None, None), "nobody knows where it is");
    }

    #[test]
    fn a_node_without_memory_or_processors_gives_way_to_the_nearest_that_has_both() {
        // Four sockets; the GPU's has no memory of its own. Distances grow with the numbers' difference.
        let four =
            machine(&[(true, true), (false, true), (true, true), (true, true)], |a, b| 20 + a.abs_diff(b));
        assert_eq!(near(Some(1), &four), Some(0), "of two that are as near, the first");
        // Two processors with a GPU's memory as a node each, near its own processor: nothing goes into the GPU's memory.
        let grace = machine(&[(true, true), (true, true), (true, false), (true, false)], |a, b| {
            if a.abs_diff(b) == 2 { 40 } else { 80 }
        });
        assert_eq!((near(Some(2), &grace), near(Some(3), &grace)), (Some(0), Some(1)));
        let alone = machine(&[(true, true), (true, false)], |_, _| 80);
        assert_eq!(near(Some(1), &alone), None, "one processor: nothing to choose");
        // The kernel does not say how far anything is.
        let silent: Vec<_> = grace.into_iter().map(|node| Node { distances: Vec::new(), ..node }).collect();
        assert_eq!((near(Some(2), &silent), near(Some(1), &silent)), (None, Some(1)));
    }

    #[test]
    fn what_the_kernel_says_is_read_as_it_says_it() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("online", "0-1,4\n");
        write("has_memory", "0-1,4\n");
        write("has_cpu", "0-1\n");
        for (number, distance) in [(0, "10 21 40\n"), (1, "21 10 80\n"), (4, "40 80 10\n")] {
            write(&format!("node{number}/distance"), distance);
        }
        let nodes = read(dir.path());
        assert_eq!(nodes.iter().map(|node| node.number).collect::<Vec<_>>(), [0, 1, 4]);
        assert_eq!(nodes[2].distances, [(0, 40), (1, 80), (4, 10)]);
        assert!(!nodes[2].processors && nodes[2].memory);
        assert_eq!(near(Some(4), &nodes), Some(0));
        assert_eq!(list("nonsense,3-x,9999"), Vec::<u32>::new());
        assert_eq!(read(&dir.path().join("none")), Vec::<Node>::new());
    }

    #[test]
    fn a_preference_is_its_threads_own_and_ends_with_it() {
        std::thread::spawn(|| {
            let before = policy();
            let Some(preference) = prefer(0) else {
                // A kernel without NUMA, a seccomp profile that forbids it, or a policy chosen for the whole run.
                return assert_eq!(policy(), before);
            };
            assert_eq!((before, policy()), (Some(MPOL_DEFAULT), Some(MPOL_PREFERRED)));
            assert!(std::thread::spawn(|| prefer(MAX_NODE + 1).is_none()).join().unwrap());
            assert!(prefer(0).is_none(), "one that is there is left alone");
            drop(preference);
            assert_eq!(policy(), Some(MPOL_DEFAULT));
        })
        .join()
        .unwrap();
    }
}
