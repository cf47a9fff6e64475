//! What a host arena promises, and what the kernel enforces for it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

use flashboot_core::{Arena, ArenaSpec, ByteRange, Code, Generation, Kind, Location, ShardId};
use flashboot_memory::{
    Expected, HostArena, HostArenaConfig, ImportedArena, NumaReport, PageKind, boot_id, check_seals, pages,
};
use rustix::{
    fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate},
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap},
};
use std::{
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

fn arena(payload: u64) -> Arc<HostArena> {
    let config = HostArenaConfig { pages: PageKind::Base, ..HostArenaConfig::default() };
    HostArena::create(ArenaSpec { payload, shards: 1 }, &config).unwrap().0
}

fn fd(arena: &HostArena) -> OwnedFd {
    arena.as_fd().try_clone_to_owned().unwrap()
}

fn expected(arena: &HostArena) -> Expected {
    Expected { payload: arena.payload(), capacity: arena.capacity(), shards: arena.shards() }
}

fn memfd(size: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, size).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[test]
fn seals_refuse_every_way_to_write_or_resize() {
    let arena = arena(10_000);
    // The descriptor itself is read-write; so is one reopened through /proc.
    let reopened = rustix::fs::open(
        format!("/proc/self/fd/{}", arena.as_fd().as_raw_fd()),
        OFlags::RDWR | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .unwrap();
    for fd in [fd(&arena), reopened] {
        // SAFETY: a null hint replaces no mapping; it is expected to fail.
        let mapped = unsafe {
            mmap(std::ptr::null_mut(), 4096, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0)
        };
        assert_eq!(mapped, Err(Errno::PERM), "a new writable mapping");
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM), "pwrite");
        assert_eq!(rustix::io::write(&fd, b"x"), Err(Errno::PERM), "write");
        assert_eq!(ftruncate(&fd, 0), Err(Errno::PERM), "shrink");
        assert_eq!(ftruncate(&fd, arena.capacity() * 2), Err(Errno::PERM), "grow");
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert_eq!(fallocate(&fd, punch, 0, 4096), Err(Errno::PERM), "punch a hole");
        assert_eq!(fcntl_add_seals(&fd, SealFlags::WRITE), Err(Errno::PERM), "another seal");
    }
    // A read-only mapping cannot be made writable afterwards.
    // SAFETY: a null hint replaces no mapping of ours.
    let base =
        unsafe { mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, MapFlags::SHARED, arena.as_fd(), 0) }
            .unwrap();
    // SAFETY: the mapping just made; the call is expected to fail.
    let upgraded = unsafe { rustix::mm::mprotect(base, 4096, rustix::mm::MprotectFlags::WRITE) };
    assert_eq!(upgraded, Err(Errno::ACCESS), "mprotect");
    arena.copy_in(0, b"the owner still writes").unwrap();
}

#[test]
fn a_forked_child_has_no_mapping_of_the_arena() {
    let arena = arena(10_000);
    let base = format!("{:x}-", arena.base().as_ptr() as usize);
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let after = maps.split_once(&base).expect("mapped").1;
    let flags = after.lines().find(|line| line.starts_with("VmFlags:")).unwrap();
    assert!(flags.split_whitespace().any(|f| f == "dc"), "no DONTFORK in {flags}");
}

#[test]
fn bytes_come_back_and_bounds_hold_for_every_odd_size() {
    let page = pages::base_page();
    for payload in [0, 1, 511, 512, page - 1, page, page + 1, 1023, 1024, 65_537] {
        let arena = arena(payload);
        assert_eq!(arena.payload(), payload);
        assert!(arena.layout().control >= payload && arena.capacity() > payload);
        let mut all = vec![1; payload as usize];
        arena.copy_out(0, &mut all).unwrap();
        assert!(all.iter().all(|b| *b == 0), "fresh memory is zero");
        let data: Vec<u8> = (0..payload).map(|i| (i % 251) as u8).collect();
        arena.copy_in(0, &data).unwrap();
        arena.copy_out(0, &mut all).unwrap();
        assert_eq!(all, data);
        arena.fill(ByteRange::new(payload / 2, payload), 7).unwrap();
        arena.copy_out(0, &mut all).unwrap();
        assert!(all[..payload as usize / 2] == data[..payload as usize / 2]);
        assert!(all[payload as usize / 2..].iter().all(|b| *b == 7));

        for (offset, len) in [(payload, 1), (0, payload as usize + 1), (u64::MAX, 1), (u64::MAX, 0)] {
            assert_eq!(arena.copy_in(offset, &vec![0; len]).unwrap_err().kind(), Kind::Invalid);
            assert_eq!(arena.copy_out(offset, &mut vec![0; len]).unwrap_err().kind(), Kind::Invalid);
        }
        for range in [ByteRange::new(0, payload + 1), ByteRange::new(u64::MAX, u64::MAX)] {
            assert_eq!(arena.fill(range, 0).unwrap_err().kind(), Kind::Invalid);
        }
        // Whatever the payload saw, the control block is whole.
        assert_eq!(arena.observe(ShardId(0)).generation, None);
        ImportedArena::map(fd(&arena), expected(&arena)).unwrap();
    }
}

#[test]
fn an_owned_range_is_busy_and_its_neighbours_are_not() {
    let arena = arena(100);
    let mut owned = arena.own(ByteRange::new(10, 20)).unwrap();
    owned.as_mut_slice().fill(9);
    assert_eq!(arena.copy_in(19, &[1]).unwrap_err().kind(), Kind::Busy);
    assert_eq!(arena.copy_out(5, &mut [0; 6]).unwrap_err().kind(), Kind::Busy);
    assert_eq!(arena.fill(ByteRange::new(0, 100), 1).unwrap_err().kind(), Kind::Busy);
    assert_eq!(arena.own(ByteRange::new(15, 16)).unwrap_err().kind(), Kind::Busy);
    arena.copy_in(20, &[1]).unwrap();
    arena.copy_out(0, &mut [0; 10]).unwrap();
    drop(owned);
    let mut seen = [0; 12];
    arena.copy_out(9, &mut seen).unwrap();
    assert_eq!(seen, [0, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 1]);
    assert_eq!(arena.own(ByteRange::new(0, 101)).unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn a_reader_sees_what_the_owner_publishes() {
    let (arena, _) =
        HostArena::create(ArenaSpec { payload: 5000, shards: 3 }, &HostArenaConfig::default()).unwrap();
    let peer = ImportedArena::map(fd(&arena), expected(&arena)).unwrap();
    assert_eq!(peer.observe(ShardId(2)).generation, None);
    let generation = Generation::from_random(77);
    arena.begin(generation);
    arena.publish(ShardId(2), 4096).unwrap();
    let seen = peer.observe(ShardId(2));
    assert_eq!((seen.generation, seen.progress), (Some(generation), 4096));
    assert_eq!(peer.observe(ShardId(0)).progress, 0);
    assert_eq!(peer.observe(ShardId(3)).progress, 0, "past the last");
    arena.retire();
    assert_eq!(peer.observe(ShardId(2)).generation, None);
}

#[test]
fn an_import_outlives_its_arena() {
    let arena = arena(100);
    arena.begin(Generation::from_random(5));
    let peer = ImportedArena::map(fd(&arena), expected(&arena)).unwrap();
    assert!(peer.populate(Instant::now() + Duration::from_secs(60)));
    assert!(!peer.populate(Instant::now()), "a deadline in the past");
    drop(arena);
    assert_eq!(peer.observe(ShardId(0)).generation, Some(Generation::from_random(5)));
}

#[test]
fn a_peers_descriptor_that_is_no_sealed_arena_is_refused_by_name() {
    let good = arena(10_000);
    let want = expected(&good);
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
    for (seal, name) in [
        (SealFlags::SHRINK, "F_SEAL_SHRINK"),
        (SealFlags::GROW, "F_SEAL_GROW"),
        (SealFlags::FUTURE_WRITE, "F_SEAL_FUTURE_WRITE"),
    ] {
        let e = ImportedArena::map(memfd(want.capacity, all - seal), want).unwrap_err();
        assert_eq!(e.kind(), Kind::Permission);
        assert!(e.detail().contains(name), "{e}");
    }
    let not_memfd = |fd: OwnedFd| {
        let e = ImportedArena::map(fd, want).unwrap_err();
        assert_eq!((e.kind(), e.code()), (Kind::Permission, Some(Code::Errno(22))), "{e}");
    };
    let path = std::env::temp_dir().join(format!("flashboot-memory-test-{}", std::process::id()));
    std::fs::write(&path, vec![0; want.capacity as usize]).unwrap();
    not_memfd(std::fs::File::open(&path).unwrap().into());
    std::fs::remove_file(&path).unwrap();
    not_memfd(rustix::pipe::pipe().unwrap().0);

    let e = ImportedArena::map(memfd(want.capacity - 4096, all), want).unwrap_err();
    assert_eq!(e.kind(), Kind::Mismatch, "too short: {e}");
    let e = ImportedArena::map(memfd(want.capacity, all), want).unwrap_err();
    assert_eq!(e.kind(), Kind::Corrupt, "no control block: {e}");
    let other = Expected { payload: want.payload + 1, ..want };
    assert_eq!(ImportedArena::map(fd(&good), other).unwrap_err().kind(), Kind::Mismatch);
    let other = Expected { shards: 2, ..want };
    assert_eq!(ImportedArena::map(fd(&good), other).unwrap_err().kind(), Kind::Mismatch);
    // Numbers that do not fit each other never reach a mapping.
    for other in [
        Expected { payload: want.capacity, ..want },
        Expected { payload: u64::MAX, ..want },
        Expected { shards: 4096, ..want },
    ] {
        assert!(ImportedArena::map(fd(&good), other).is_err());
    }
    check_seals(good.as_fd()).unwrap();
    ImportedArena::map(fd(&good), want).unwrap();
}

#[test]
fn prefault_takes_every_page_and_says_how_long() {
    let config = HostArenaConfig { pages: PageKind::Base, prefault_threads: 3, ..HostArenaConfig::default() };
    let (arena, report) = HostArena::create(ArenaSpec { payload: 200 << 20, shards: 1 }, &config).unwrap();
    assert!(report.prefault.is_some() && report.reserve.is_zero());
    assert!(resident(&arena) >= 200 << 20);
    let config = HostArenaConfig { prefault_threads: 0, ..config };
    let (arena, report) = HostArena::create(ArenaSpec { payload: 8 << 20, shards: 1 }, &config).unwrap();
    assert!(report.prefault.is_none() && !report.reserve.is_zero());
    // Reserved is not faulted in, but the pages are there.
    assert_eq!(resident(&arena), 4096.max(pages::base_page()));
    let stat = rustix::fs::fstat(arena.as_fd()).unwrap();
    assert!(stat.st_blocks * 512 >= 8 << 20);
}

/// Bytes of the arena's mapping in this process's page table.
fn resident(arena: &HostArena) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let after = maps.split_once(&format!("{:x}-", arena.base().as_ptr() as usize)).unwrap().1;
    let line = after.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
fn more_memory_than_there_is_is_an_error_and_not_a_signal() {
    for payload in [1 << 45, 1 << 62, u64::MAX - 4096, u64::MAX] {
        for prefault_threads in [0, 2] {
            let config = HostArenaConfig { prefault_threads, ..HostArenaConfig::default() };
            let e = HostArena::create(ArenaSpec { payload, shards: 1 }, &config).unwrap_err();
            assert_eq!(e.kind(), Kind::Exhausted, "{e}");
            assert!(e.remedy().is_some() && e.to_string().contains(&payload.to_string()[..8]), "{e}");
        }
    }
}

#[test]
fn without_enough_huge_pages_auto_takes_base_pages_and_huge_says_how_many_to_reserve() {
    let huge = pages::HugePages::read(None).expect("a kernel with hugetlb: /proc/meminfo has Hugepagesize");
    let payload = (huge.available + 3) * huge.bytes;
    let needed = huge.available + 4;
    let spec = ArenaSpec { payload, shards: 1 };
    let config = HostArenaConfig { pages: PageKind::Huge, ..HostArenaConfig::default() };
    let e = HostArena::create(spec, &config).unwrap_err();
    assert_eq!(e.kind(), Kind::Unavailable);
    let remedy = format!("sysctl vm.nr_hugepages={}", huge.total + needed - huge.available);
    assert!(e.to_string().contains(&remedy), "{e}");
    let (arena, report) = HostArena::create(spec, &HostArenaConfig::default()).unwrap();
    assert!(!report.huge && report.page_bytes == pages::base_page());
    assert!(report.why.contains("huge pages of 2MiB are needed") || huge.bytes != 2 << 20, "{report}");
    assert_eq!(arena.capacity() % pages::base_page(), 0);
}

#[test]
#[ignore = "needs 32 free huge pages: sysctl vm.nr_hugepages=32"]
fn with_enough_huge_pages_an_arena_has_them() {
    let spec = ArenaSpec { payload: 5 << 20, shards: 2 };
    for prefault_threads in [0, 2] {
        for kind in [PageKind::Auto, PageKind::Huge] {
            let config = HostArenaConfig { pages: kind, prefault_threads, ..HostArenaConfig::default() };
            let (arena, report) = HostArena::create(spec, &config).unwrap();
            assert!(report.huge, "{report}");
            assert_eq!(arena.capacity() % report.page_bytes, 0);
            arena.copy_in((5 << 20) - 3, b"end").unwrap();
            arena.begin(Generation::from_random(3));
            let peer = ImportedArena::map(fd(&arena), expected(&arena)).unwrap();
            assert!(peer.populate(Instant::now() + Duration::from_secs(60)));
            assert_eq!(peer.observe(ShardId(1)).generation, Some(Generation::from_random(3)));
            assert_eq!(ftruncate(arena.as_fd(), 0), Err(Errno::PERM));
            // SAFETY: a null hint replaces no mapping; it is expected to fail.
            let mapped = unsafe {
                mmap(
                    std::ptr::null_mut(),
                    arena.capacity() as usize,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED,
                    arena.as_fd(),
                    0,
                )
            };
            assert_eq!(mapped, Err(Errno::PERM));
        }
    }
}

#[test]
fn a_numa_node_is_bound_or_the_report_says_why_not() {
    let config = HostArenaConfig { numa_node: Some(0), pages: PageKind::Base, ..HostArenaConfig::default() };
    let spec = ArenaSpec { payload: 1 << 20, shards: 1 };
    let (arena, report) = HostArena::create(spec, &config).unwrap();
    let Location::Host { boot_id: id, numa_node } = arena.location() else { panic!("not host memory") };
    assert_eq!(id, boot_id().unwrap());
    match report.numa {
        NumaReport::Bound(node) => assert_eq!((node, numa_node), (0, Some(0))),
        NumaReport::Refused { node, why } => {
            assert_eq!((node, numa_node), (0, None));
            assert!(report.warnings.iter().any(|w| w.contains(&why)));
        }
        NumaReport::NotAsked => panic!("asked for"),
    }
    if matches!(numa_node, Some(0)) {
        let config = HostArenaConfig { numa_node: Some(1000), ..config };
        let e = HostArena::create(spec, &config).unwrap_err();
        assert_eq!(e.kind(), Kind::Invalid, "{e}");
    }
    let config = HostArenaConfig { numa_node: Some(u32::MAX), ..HostArenaConfig::default() };
    assert_eq!(HostArena::create(spec, &config).unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn parts_of_an_owned_range_are_disjoint_and_free_it_with_the_last() {
    let (arena, _) =
        HostArena::create(ArenaSpec { payload: 1000, shards: 1 }, &HostArenaConfig::default()).unwrap();
    let whole = ByteRange::new(100, 900);
    let mut parts = arena.own(whole).unwrap().into_parts(300.try_into().unwrap());
    let ranges: Vec<_> = parts.iter().map(|part| part.range()).collect();
    assert_eq!(ranges, [(100, 400), (400, 700), (700, 900)].map(|(start, end)| ByteRange::new(start, end)));
    std::thread::scope(|scope| {
        for (value, part) in (1u8..).zip(&mut parts) {
            scope.spawn(move || part.as_mut_slice().fill(value));
        }
    });
    let last = parts.pop();
    drop(parts);
    assert_eq!(arena.fill(ByteRange::new(899, 900), 0).unwrap_err().kind(), Kind::Busy);
    assert!(!arena.is_free(ByteRange::new(100, 101)), "the range is owned until its last part goes");
    drop(last);
    let mut found = vec![0; 1000];
    arena.copy_out(0, &mut found).unwrap();
    for (range, value) in [(0..100, 0), (100..400, 1), (400..700, 2), (700..900, 3), (900..1000, 0)] {
        assert!(found[range.clone()].iter().all(|byte| *byte == value), "{range:?}");
    }
    assert!(arena.own(ByteRange::new(5, 5)).unwrap().into_parts(1.try_into().unwrap()).is_empty());
}

#[test]
fn payload_is_sent_into_a_socket_and_nothing_past_it() {
    use std::io::Read as _;
    let arena = arena(1000);
    let bytes: Vec<u8> = (0..1000).map(|at| at as u8).collect();
    arena.copy_in(0, &bytes).unwrap();
    let (sender, mut receiver) = std::os::unix::net::UnixStream::pair().unwrap();
    assert_eq!(arena.send(&sender, ByteRange::new(10, 1000)).unwrap(), 990);
    let mut found = vec![0; 990];
    receiver.read_exact(&mut found).unwrap();
    assert_eq!(found, bytes[10..]);
    let past = arena.send(&sender, ByteRange::new(999, 1001)).unwrap_err();
    assert_eq!(past.kind(), std::io::ErrorKind::InvalidInput);
    drop(receiver);
    let gone = arena.send(&sender, ByteRange::new(0, 1)).unwrap_err();
    assert_eq!(gone.kind(), std::io::ErrorKind::BrokenPipe, "an error and no signal");
}
